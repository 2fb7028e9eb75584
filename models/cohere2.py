"""cohere2: attention and MLP side by side behind one layer norm (Cohere, 2024).

Three of four layers have a window and rotate neighbouring dims; the fourth sees everything and has
no positions. The head is the embedding, its logits times `logit_scale`.
"""

from __future__ import annotations

import mlx.core as mx

from qrun.blocks import FULL, SLIDING, Attention, GatedMLP, Sizes, layer_types, output_head
from qrun.cache import Cache, CacheSpec
from qrun.config import TINY, Config
from qrun.positions import no_rope, rope_from
from qrun.weights import Weights


class Layer:
    def __init__(self, config: Config, weights: Weights, sizes: Sizes, index: int) -> None:
        bias = config.bool("attention_bias", False)
        eps = config.float("layer_norm_eps", 1e-5, least=0)
        self.input_layernorm = weights.layer_norm("input_layernorm", sizes.k, eps)
        self.self_attn = Attention(
            weights.at("self_attn"),
            sizes,
            index,
            qkv_bias=bias,
            o_bias=bias,
            interleaved=True,
        )
        self.mlp = GatedMLP(weights.at("mlp"), sizes.k, config.int("intermediate_size"))

    def __call__(self, x: mx.array, cache: Cache) -> mx.array:
        h = self.input_layernorm(x)
        return self.mlp(h, residual=self.self_attn(h, cache, residual=x))


class Model:
    def __init__(self, config: Config, weights: Weights) -> None:
        config.require("hidden_act", "silu")
        config.require("use_qk_norm", False)
        config.require("layer_norm_bias", False)
        sizes = Sizes.of(config)
        self.logit_scale = config.float("logit_scale", 0.0625, least=TINY)
        model = weights.at("model")
        self.embed_tokens = model.embedding("embed_tokens", sizes.vocab, sizes.k)
        self.layers = [
            Layer(config, model.at(f"layers.{i}"), sizes, i) for i in range(sizes.layers)
        ]
        self.norm = model.layer_norm("norm", sizes.k, config.float("layer_norm_eps", 1e-5, least=0))
        self.lm_head = output_head(config, weights, self.embed_tokens, sizes, tied=True)
        rope, none = rope_from(config, sizes.head_dim), no_rope(sizes.head_dim)
        pattern = config.int("sliding_window_pattern", 4)
        window = config.int("sliding_window", 4096)
        own = {SLIDING: (rope, window), FULL: (none, 0)}
        self.cache_specs = [
            CacheSpec(sizes.kv_heads, sizes.head_dim, *own[kind])
            for kind in layer_types(config, sizes.layers, pattern=pattern)
        ]

    def __call__(self, ids: mx.array, cache: Cache) -> mx.array:
        """ids (M,) int32, the tokens behind the cache's end -> hidden states (M, K)."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cache)
        return x

    def logits(self, x: mx.array) -> mx.array:
        """Hidden states (M, K) -> logits (M, V)."""
        return self.lm_head(self.norm(x), scale=self.logit_scale)
