"""qwen2: llama with biases on q, k and v (Yang et al., 2024)."""

from __future__ import annotations

import mlx.core as mx

from qrun.blocks import Attention, GatedMLP, Sizes, late_windows, output_head
from qrun.cache import Cache, CacheSpec
from qrun.config import Config
from qrun.positions import rope_from
from qrun.weights import Weights


class Layer:
    def __init__(self, config: Config, weights: Weights, sizes: Sizes, index: int) -> None:
        self.input_layernorm = weights.norm("input_layernorm", sizes.k, sizes.eps)
        self.self_attn = Attention(weights.at("self_attn"), sizes, index, qkv_bias=True)
        self.post_attention_layernorm = weights.norm("post_attention_layernorm", sizes.k, sizes.eps)
        self.mlp = GatedMLP(weights.at("mlp"), sizes.k, config.int("intermediate_size"))

    def __call__(self, x: mx.array, cache: Cache) -> mx.array:
        x = self.self_attn(x, cache, norm=self.input_layernorm, residual=x)
        return self.mlp(x, norm=self.post_attention_layernorm, residual=x)


class Model:
    def __init__(self, config: Config, weights: Weights) -> None:
        config.require("hidden_act", "silu")
        sizes = Sizes.of(config)
        model = weights.at("model")
        self.embed_tokens = model.embedding("embed_tokens", sizes.vocab, sizes.k)
        self.layers = [
            Layer(config, model.at(f"layers.{i}"), sizes, i) for i in range(sizes.layers)
        ]
        self.norm = model.norm("norm", sizes.k, sizes.eps)
        self.lm_head = output_head(config, weights, self.embed_tokens, sizes)
        rope = rope_from(config, sizes.head_dim)
        self.cache_specs = [
            CacheSpec(sizes.kv_heads, sizes.head_dim, rope, window)
            for window in late_windows(config, sizes.layers)
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
