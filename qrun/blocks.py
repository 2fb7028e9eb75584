"""The two halves of a decoder layer that nearly every architecture shares, and its sizes.

Shapes: B*L tokens are M rows; hidden width K; H query heads and Hkv key/value heads of D dims.
Model files say how the blocks are wired and what is special; what a block does stands here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import mlx.core as mx

from qrun import ops
from qrun.cache import Cache
from qrun.config import Config
from qrun.errors import CheckpointError
from qrun.layers import RMSNorm
from qrun.ops.qmv import Activation
from qrun.weights import Weights


@dataclass(frozen=True)
class Sizes:
    """The numbers of config.json that every decoder has."""

    k: int  # hidden_size
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @staticmethod
    def of(config: Config) -> Sizes:
        """Read and check them; head_dim is explicit or hidden_size / heads."""
        k, heads = config.int("hidden_size"), config.int("num_attention_heads")
        kv_heads = config.int("num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"{config.where}: num_attention_heads {heads} is no multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        if "head_dim" not in config and k % heads:
            raise CheckpointError(
                f"{config.where}: hidden_size {k} is no multiple of num_attention_heads {heads}"
            )
        return Sizes(
            k,
            config.int("vocab_size"),
            config.int("num_hidden_layers"),
            heads,
            kv_heads,
            config.int("head_dim", max(k // heads, 1)),
            config.float("rms_norm_eps", 1e-6),
        )


class Attention:
    """Grouped-query attention over the cache: norm+qkv, rope+append, sdpa, o+residual: four ops.

    qk_norm: RMS norms of each head of q and k before the rotation. window 0: all that came before.
    """

    def __init__(
        self,
        weights: Weights,
        sizes: Sizes,
        index: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
        window: int = 0,
    ) -> None:
        d, h, hkv = sizes.head_dim, sizes.heads, sizes.kv_heads
        self.index, self.heads, self.window, self.eps = index, h, window, sizes.eps
        self.scale = 1 / sqrt(d)
        self.qkv_proj = weights.linear(
            "q_proj", "k_proj", "v_proj", n=(h * d, hkv * d, hkv * d), k=sizes.k, bias=qkv_bias
        )
        self.q_norm = weights.norm("q_norm", d, sizes.eps).weight if qk_norm else None
        self.k_norm = weights.norm("k_norm", d, sizes.eps).weight if qk_norm else None
        self.o_proj = weights.linear("o_proj", n=(sizes.k,), k=h * d, bias=o_bias)

    def __call__(self, x: mx.array, norm: RMSNorm, cache: Cache) -> mx.array:
        """x (M, K) -> x + attention(norm(x)) (M, K)."""
        i = self.index
        q, cache.keys[i], cache.values[i] = ops.rope(
            self.qkv_proj(x, norm=norm),
            cache.keys[i],
            cache.values[i],
            cache.offset,
            cache.tables[i],
            heads=self.heads,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
        )
        y = ops.sdpa(
            q,
            cache.keys[i],
            cache.values[i],
            cache.offset,
            scale=self.scale,
            window=self.window,
        )
        return self.o_proj(y, residual=x)


class GatedMLP:
    """down(act(gate(h)) * up(h)): norm+gate/up+activation, down+residual: two ops."""

    def __init__(
        self,
        weights: Weights,
        k: int,
        n: int,
        *,
        bias: bool = False,
        activation: Activation = "swiglu",
    ) -> None:
        self.activation: Activation = activation
        self.gate_up_proj = weights.linear(
            "gate_proj", "up_proj", n=(n, n), k=k, bias=bias, interleave=True
        )
        self.down_proj = weights.linear("down_proj", n=(k,), k=n, bias=bias)

    def __call__(self, x: mx.array, norm: RMSNorm) -> mx.array:
        """x (M, K) -> x + mlp(norm(x)) (M, K)."""
        return self.down_proj(
            self.gate_up_proj(x, norm=norm, activation=self.activation), residual=x
        )
