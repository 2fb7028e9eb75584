"""smollm3: llama in which some layers have no positions (Bakouch et al., 2025; Yang et al., 2025).

`no_rope_layers` has 1 for a layer with rope, 0 for one without; by default every fourth is without.
"""

from __future__ import annotations

import mlx.core as mx

from qrun.blocks import Attention, GatedMLP, Sizes, output_head
from qrun.cache import Cache, CacheSpec
from qrun.config import Config
from qrun.errors import CheckpointError
from qrun.positions import no_rope, rope_from
from qrun.weights import Weights


class Layer:
    def __init__(self, config: Config, weights: Weights, sizes: Sizes, index: int) -> None:
        bias = config.bool("attention_bias", False)
        self.input_layernorm = weights.norm("input_layernorm", sizes.k, sizes.eps)
        self.self_attn = Attention(
            weights.at("self_attn"), sizes, index, qkv_bias=bias, o_bias=bias
        )
        self.post_attention_layernorm = weights.norm("post_attention_layernorm", sizes.k, sizes.eps)
        self.mlp = GatedMLP(
            weights.at("mlp"),
            sizes.k,
            config.int("intermediate_size"),
            bias=config.bool("mlp_bias", False),
        )

    def __call__(self, x: mx.array, cache: Cache) -> mx.array:
        x = self.self_attn(x, cache, norm=self.input_layernorm, residual=x)
        return self.mlp(x, norm=self.post_attention_layernorm, residual=x)


class Model:
    def __init__(self, config: Config, weights: Weights) -> None:
        config.require("hidden_act", "silu")
        config.require("use_sliding_window", False)
        sizes = Sizes.of(config)
        model = weights.at("model")
        self.embed_tokens = model.embedding("embed_tokens", sizes.vocab, sizes.k)
        self.layers = [
            Layer(config, model.at(f"layers.{i}"), sizes, i) for i in range(sizes.layers)
        ]
        self.norm = model.norm("norm", sizes.k, sizes.eps)
        self.lm_head = output_head(config, weights, self.embed_tokens, sizes, tied=True)
        rope, none = rope_from(config, sizes.head_dim), no_rope(sizes.head_dim)
        self.cache_specs = [
            CacheSpec(sizes.kv_heads, sizes.head_dim, rope if rotated else none)
            for rotated in rope_layers(config, sizes.layers)
        ]

    def __call__(self, ids: mx.array, cache: Cache) -> mx.array:
        """ids (M,) int32, the tokens behind the cache's end -> hidden states (M, K)."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cache)
        return x

    def logits(self, x: mx.array) -> mx.array:
        """Hidden states (M, K) -> logits (M, V)."""
        return self.lm_head(x, norm=self.norm)


def rope_layers(config: Config, layers: int) -> list[bool]:
    """Which layers rotate q and k."""
    if "no_rope_layers" not in config:
        interval = config.int("no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(layers)]
    given = config.ints("no_rope_layers")
    if len(given) != layers:
        raise CheckpointError(
            f"{config.where}: no_rope_layers has {len(given)} entries for {layers} layers"
        )
    return [bool(rotated) for rotated in given]
