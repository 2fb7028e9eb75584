"""The parts of a decoder layer that nearly every architecture shares, and its sizes.

Shapes: B*L tokens are M rows; hidden width K; H query heads and Hkv key/value heads of D dims.
Model files say how the blocks are wired and what is special; what a block does stands here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import mlx.core as mx

from qrun import ops
from qrun.cache import Cache
from qrun.config import Config
from qrun.errors import CheckpointError
from qrun.layers import AnyLinear, Embedding, RMSNorm
from qrun.ops.qmv import Activation
from qrun.weights import Weights

FULL, SLIDING = "full_attention", "sliding_attention"
MOST_DIMS = 1 << 16  # of a head


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
        # The upper limits are far from any model's; they keep nonsense from filling the memory.
        k, heads = (
            config.int("hidden_size", most=1 << 20),
            config.int("num_attention_heads", most=1 << 16),
        )
        kv_heads = config.int("num_key_value_heads", heads, most=1 << 16)
        if heads % kv_heads:
            raise CheckpointError(
                f"{config.where}: num_attention_heads {heads} is no multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        if "head_dim" not in config and k % heads:
            raise CheckpointError(
                f"{config.where}: hidden_size {k} is no multiple of num_attention_heads {heads}"
            )
        head_dim = config.int("head_dim", max(k // heads, 1), most=MOST_DIMS)
        if head_dim > MOST_DIMS:
            raise CheckpointError(
                f"{config.where}: hidden_size {k} in {heads} heads: heads have {MOST_DIMS} at most"
            )
        if head_dim % 2:
            raise CheckpointError(f"{config.where}: head_dim {head_dim} is odd: it has no pairs")
        return Sizes(
            k,
            config.int("vocab_size"),
            config.int("num_hidden_layers", most=10000),
            heads,
            kv_heads,
            head_dim,
            config.float("rms_norm_eps", 1e-6, least=0),
        )


def layer_types(config: Config, layers: int, *, pattern: int) -> list[str]:
    """`layer_types`, else every `pattern`-th layer sees everything and the others have a window.

    A pattern longer than the model means that no layer sees everything.
    """
    given = config.strings("layer_types")
    if not given:
        return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]
    if len(given) != layers or not set(given) <= {FULL, SLIDING}:
        raise CheckpointError(
            f"{config.where}: layer_types must be {layers} times {FULL} or {SLIDING}, "
            f"but are {len(given)}: {', '.join(sorted(set(given)))}"
        )
    return given


def late_windows(config: Config, layers: int) -> list[int]:
    """Windows as qwen has them: if `use_sliding_window`, in layers from `max_window_layers` on."""
    window = config.int("sliding_window", 0, least=0)  # there in any case
    if not config.bool("use_sliding_window", False):
        return [0] * layers
    if "layer_types" in config:
        return [window if t == SLIDING else 0 for t in layer_types(config, layers, pattern=1)]
    first = config.int("max_window_layers", 28, least=0)
    return [window if i >= first else 0 for i in range(layers)]


def output_head(
    config: Config, weights: Weights, embedding: Embedding, sizes: Sizes, *, tied: bool = False
) -> AnyLinear:
    """lm_head, or the embedding where the model ties the two.

    tied: what the architecture means where config.json says nothing; without a head it is tied.
    """
    if config.bool("tie_word_embeddings", tied or not weights.has("lm_head.weight")):
        weights.drop("lm_head")
        return embedding.as_linear()
    weights.seldom("model.embed_tokens", share=1 / sizes.vocab)
    return weights.linear("lm_head", n=(sizes.vocab,), k=sizes.k)


class Attention:
    """Grouped-query attention over the cache: norm+qkv, rope+append+sdpa, o+residual: three ops.

    fused: the file holds one `qkv_proj`. qk_norm: RMS norms of q and k before the rotation, of each
    "head" or of all heads as one "row"; plus_one: as in `Weights.norm`. interleaved: the checkpoint
    rotates dims 2i and 2i+1 together. softcap 0: none. scale: of the scores, 1/sqrt(D) if not
    given. How far back a layer sees is its cache's: `CacheSpec.window`.
    """

    def __init__(
        self,
        weights: Weights,
        sizes: Sizes,
        index: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        fused: bool = False,
        qk_norm: Literal["head", "row"] | None = None,
        plus_one: bool = False,
        interleaved: bool = False,
        softcap: float = 0.0,
        scale: float | None = None,
    ) -> None:
        d, h, hkv = sizes.head_dim, sizes.heads, sizes.kv_heads
        self.index, self.heads, self.eps = index, h, sizes.eps
        self.softcap = softcap
        self.scale = 1 / sqrt(d) if scale is None else scale
        rows = (h * d, hkv * d, hkv * d)
        if fused:
            self.qkv_proj = weights.linear("qkv_proj", n=(sum(rows),), k=sizes.k, bias=qkv_bias)
        else:
            self.qkv_proj = weights.linear(
                "q_proj",
                "k_proj",
                "v_proj",
                n=rows,
                k=sizes.k,
                bias=qkv_bias,
                pairs=(d, d, 0) if interleaved else None,
            )
        self.head_norms: tuple[RMSNorm, RMSNorm] | None = None
        self.row_norms: tuple[RMSNorm, RMSNorm] | None = None
        if qk_norm is not None:
            widths = (d, d) if qk_norm == "head" else rows[:2]
            q_norm = weights.norm("q_norm", widths[0], sizes.eps, plus_one=plus_one)
            k_norm = weights.norm("k_norm", widths[1], sizes.eps, plus_one=plus_one)
            if qk_norm == "head":
                self.head_norms = (q_norm, k_norm)
            else:
                self.row_norms = (q_norm, k_norm)
        self.o_proj = weights.linear("o_proj", n=(sizes.k,), k=h * d, bias=o_bias)

    def __call__(
        self,
        x: mx.array,
        cache: Cache,
        *,
        norm: RMSNorm | None = None,
        residual: mx.array | None = None,
        scale: float = 1.0,
    ) -> mx.array:
        """x (M, K) -> attention(norm(x)) * scale + residual (M, K)."""
        i = self.index
        qkv = self.qkv_proj(x, norm=norm)
        if self.row_norms is not None:
            qkv = ops.rms_norm_parts(qkv, [norm.weight for norm in self.row_norms], self.eps)
        q_norm, k_norm = self.head_norms or (None, None)
        y, cache.keys[i], cache.values[i] = ops.attend(
            qkv,
            cache.keys[i],
            cache.values[i],
            cache.offset,
            cache.tables[i],
            heads=self.heads,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=self.eps,
            scale=self.scale,
            window=cache.specs[i].window,
            softcap=self.softcap,
        )
        return self.o_proj(y, residual=residual, scale=scale)


class GatedMLP:
    """down(act(gate(h)) * up(h)): norm+gate/up+activation, down+residual: two ops.

    fused: the file holds one `gate_up_proj`, all gate rows in front of all up rows.
    """

    def __init__(
        self,
        weights: Weights,
        k: int,
        n: int,
        *,
        bias: bool = False,
        fused: bool = False,
        activation: Activation = "swiglu",
    ) -> None:
        self.activation: Activation = activation
        names, rows = (("gate_up_proj",), (2 * n,)) if fused else (("gate_proj", "up_proj"), (n, n))
        self.gate_up_proj = weights.linear(*names, n=rows, k=k, bias=bias, interleave=True)
        self.down_proj = weights.linear("down_proj", n=(k,), k=n, bias=bias)

    def __call__(
        self,
        x: mx.array,
        *,
        norm: RMSNorm | None = None,
        residual: mx.array | None = None,
        scale: float = 1.0,
    ) -> mx.array:
        """x (M, K) -> mlp(norm(x)) * scale + residual (M, K)."""
        y = self.gate_up_proj(x, norm=norm, activation=self.activation)
        return self.down_proj(y, residual=residual, scale=scale)


class MixtureMLP:
    """`top` of E gated MLPs a token, weighted by a router (Shazeer et al., 2017).

    renormalize: the weights of the chosen add up to 1; otherwise they are their share of all E.
    names: gate, up and down as the checkpoint lists them expert by expert.
    """

    def __init__(
        self,
        weights: Weights,
        k: int,
        n: int,
        *,
        count: int,
        top: int,
        renormalize: bool,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        self.top, self.renormalize = top, renormalize
        gate, up, down = names
        self.gate = weights.linear("gate", n=(count,), k=k)
        self.gate_up_proj = weights.experts(
            ("gate_proj", gate), ("up_proj", up), count=count, n=n, k=k
        )
        self.down_proj = weights.experts(("down_proj", down), count=count, n=k, k=n)
        weights.seldom("switch_mlp", "experts", share=top / count)

    def __call__(self, x: mx.array, *, norm: RMSNorm, residual: mx.array) -> mx.array:
        """x (M, K) -> sum of the chosen experts' mlp(norm(x)) + residual (M, K)."""
        h = norm(x)
        routes = ops.route(self.gate(h), self.top, renormalize=self.renormalize)
        grouped = x.shape[0] > 1
        y = self.gate_up_proj(h, routes.row, routes.expert, activation="swiglu", grouped=grouped)
        y = self.down_proj(y, None, routes.expert, grouped=grouped)
        return ops.combine(y, routes.place, routes.share, residual)
