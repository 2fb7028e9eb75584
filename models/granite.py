"""granite: llama with four multipliers (Granite Team, IBM, 2024).

On embeddings, on scores instead of 1/sqrt(D), on what each block adds, and (a divisor) on logits.
"""

from __future__ import annotations

import mlx.core as mx

from qrun.blocks import Attention, GatedMLP, Sizes, output_head
from qrun.cache import Cache, CacheSpec
from qrun.config import TINY, Config
from qrun.positions import rope_from
from qrun.weights import Weights


class Layer:
    def __init__(self, config: Config, weights: Weights, sizes: Sizes, index: int) -> None:
        self.residual_multiplier = config.float("residual_multiplier", 1.0, least=TINY)
        self.input_layernorm = weights.norm("input_layernorm", sizes.k, sizes.eps)
        self.self_attn = Attention(
            weights.at("self_attn"),
            sizes,
            index,
            scale=config.float("attention_multiplier", 1.0, least=TINY),
        )
        self.post_attention_layernorm = weights.norm("post_attention_layernorm", sizes.k, sizes.eps)
        self.mlp = GatedMLP(weights.at("mlp"), sizes.k, config.int("intermediate_size"))

    def __call__(self, x: mx.array, cache: Cache) -> mx.array:
        m = self.residual_multiplier
        x = self.self_attn(x, cache, norm=self.input_layernorm, residual=x, scale=m)
        return self.mlp(x, norm=self.post_attention_layernorm, residual=x, scale=m)


class Model:
    def __init__(self, config: Config, weights: Weights) -> None:
        config.require("hidden_act", "silu")
        # With biases the multiplier would have to reach them, too; no published granite has any.
        config.require("attention_bias", False)
        config.require("mlp_bias", False)
        self.embedding_multiplier = config.float("embedding_multiplier", 1.0, least=TINY)
        self.logits_scaling = config.float("logits_scaling", 1.0, least=TINY)
        sizes = Sizes.of(config)
        model = weights.at("model")
        self.embed_tokens = model.embedding("embed_tokens", sizes.vocab, sizes.k)
        self.layers = [
            Layer(config, model.at(f"layers.{i}"), sizes, i) for i in range(sizes.layers)
        ]
        self.norm = model.norm("norm", sizes.k, sizes.eps)
        self.lm_head = output_head(config, weights, self.embed_tokens, sizes)
        rope = rope_from(config, sizes.head_dim)
        self.cache_specs = [CacheSpec(sizes.kv_heads, sizes.head_dim, rope)] * sizes.layers

    def __call__(self, ids: mx.array, cache: Cache) -> mx.array:
        """ids (M,) int32, the tokens behind the cache's end -> hidden states (M, K)."""
        x = self.embed_tokens(ids, scale=self.embedding_multiplier)
        for layer in self.layers:
            x = layer(x, cache)
        return x

    def logits(self, x: mx.array) -> mx.array:
        """Hidden states (M, K) -> logits (M, V)."""
        return self.lm_head(x, norm=self.norm, scale=1 / self.logits_scaling)
