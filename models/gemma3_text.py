"""gemma3, text: gemma2 with q/k norms instead of softcaps (Gemma Team, 2025).

Five layers of six have a window and a rope of their own. model_type gemma3 is the same beside a
vision tower, which is left alone: the text lies in `text_config` and under `language_model.`, and
config.json leaves out what DEFAULTS has.
"""

from __future__ import annotations

import mlx.core as mx

from qrun.blocks import FULL, SLIDING, Attention, GatedMLP, Sizes, layer_types, output_head
from qrun.cache import Cache, CacheSpec
from qrun.config import TINY, Config
from qrun.layers import round_to_bfloat16, softcap
from qrun.positions import Rope, rope_from
from qrun.weights import Weights

DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "vocab_size": 262208,
}


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
            qk_norm="head",
            plus_one=True,
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
        config.require("use_bidirectional_attention", False)
        weights.need_range()
        sizes = Sizes.of(config)
        if weights.has("language_model.model.norm.weight"):
            weights.drop("vision_tower")
            weights.drop("multi_modal_projector")
            weights = weights.at("language_model")
        model = weights.at("model")
        self.embed_tokens = model.embedding("embed_tokens", sizes.vocab, sizes.k)
        self.embedding_scale = round_to_bfloat16(sizes.k**0.5)
        self.layers = [
            Layer(config, model.at(f"layers.{i}"), sizes, i) for i in range(sizes.layers)
        ]
        self.norm = model.norm("norm", sizes.k, sizes.eps, plus_one=True)
        self.lm_head = output_head(config, weights, self.embed_tokens, sizes, tied=True)
        self.softcap = config.float("final_logit_softcapping", 0.0, least=0)
        ropes = {kind: rope_of(config, sizes.head_dim, kind) for kind in (FULL, SLIDING)}
        pattern = config.int("sliding_window_pattern", 6)
        window = config.int("sliding_window")
        self.cache_specs = [
            CacheSpec(sizes.kv_heads, sizes.head_dim, ropes[kind], window if kind == SLIDING else 0)
            for kind in layer_types(config, sizes.layers, pattern=pattern)
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


def rope_of(config: Config, head_dim: int, kind: str) -> Rope:
    """The rope of a kind of layer. Old configs scale only that of layers that see everything."""
    if "rope_parameters" in config:
        theta = 1e6 if kind == FULL else 10000.0
        return rope_from(config, head_dim, layer_type=kind, theta=theta)
    if kind == FULL:
        return rope_from(config, head_dim, theta=1e6)
    local = {"rope_theta": config.float("rope_local_base_freq", 10000.0, least=TINY)}
    return rope_from(Config(local, config.where), head_dim)
