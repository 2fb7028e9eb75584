"""gemma2: norms around each block, softcaps, a window in every other layer (Gemma Team, 2024).

Norms store weight - 1; embeddings are multiplied by sqrt(K) as bfloat16 has it.
"""

from __future__ import annotations

import mlx.core as mx

from qrun.blocks import SLIDING, Attention, GatedMLP, Sizes, layer_types, output_head
from qrun.cache import Cache, CacheSpec
from qrun.config import Config
from qrun.layers import round_to_bfloat16, softcap
from qrun.positions import rope_from
from qrun.weights import Weights

DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}


class Layer:
    def __init__(self, config: Config, weights: Weights, sizes: Sizes, index: int) -> None:
        bias = config.bool("attention_bias", False)
        k, eps = sizes.k, sizes.eps
        self.input_layernorm = weights.norm("input_layernorm", k, eps, plus_one=True)
        self.self_attn = Attention(
            weights.at("self_attn"),
            sizes,
            index,
            qkv_bias=bias,
            o_bias=bias,
            softcap=config.float("attn_logit_softcapping", 0.0, least=0),
            scale=config.int("query_pre_attn_scalar", 256) ** -0.5,
        )
        self.post_attention_layernorm = weights.norm(
            "post_attention_layernorm", k, eps, plus_one=True
        )
        self.pre_feedforward_layernorm = weights.norm(
            "pre_feedforward_layernorm", k, eps, plus_one=True
        )
        self.mlp = GatedMLP(
            weights.at("mlp"), k, config.int("intermediate_size"), activation="geglu"
        )
        self.post_feedforward_layernorm = weights.norm(
            "post_feedforward_layernorm", k, eps, plus_one=True
        )

    def __call__(self, x: mx.array, cache: Cache) -> mx.array:
        y = self.self_attn(x, cache, norm=self.input_layernorm)
        x = self.post_attention_layernorm(y, residual=x)
        y = self.mlp(x, norm=self.pre_feedforward_layernorm)
        return self.post_feedforward_layernorm(y, residual=x)


class Model:
    def __init__(self, config: Config, weights: Weights) -> None:
        for key in ("hidden_activation", "hidden_act"):
            config.require(key, "gelu_pytorch_tanh")
        weights.need_range()
        sizes = Sizes.of(config)
        model = weights.at("model")
        self.embed_tokens = model.embedding("embed_tokens", sizes.vocab, sizes.k)
        self.embedding_scale = round_to_bfloat16(sizes.k**0.5)
        self.layers = [
            Layer(config, model.at(f"layers.{i}"), sizes, i) for i in range(sizes.layers)
        ]
        self.norm = model.norm("norm", sizes.k, sizes.eps, plus_one=True)
        self.lm_head = output_head(config, weights, self.embed_tokens, sizes, tied=True)
        self.softcap = config.float("final_logit_softcapping", 0.0, least=0)
        rope = rope_from(config, sizes.head_dim)
        window = config.int("sliding_window")
        self.cache_specs = [
            CacheSpec(sizes.kv_heads, sizes.head_dim, rope, window if kind == SLIDING else 0)
            for kind in layer_types(config, sizes.layers, pattern=2)
        ]

    def __call__(self, ids: mx.array, cache: Cache) -> mx.array:
        """ids (M,) int32, the tokens behind the cache's end -> hidden states (M, K)."""
        x = self.embed_tokens(ids, scale=self.embedding_scale)
        for layer in self.layers:
            x = layer(x, cache)
        return x

    def logits(self, x: mx.array) -> mx.array:
        """Hidden states (M, K) -> logits (M, V)."""
        return softcap(self.lm_head(x, norm=self.norm), self.softcap)
