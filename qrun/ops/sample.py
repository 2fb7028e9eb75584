"""sample: draw a token from filtered logits.

Temperature first, then top-k, top-p and min-p, as in Hugging Face's library; then the first token
whose cumulated probability exceeds u times the sum, in the order of ids. One u in [0, 1) a row:
the same u draws the same token on every backend, up to rounding.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape


def sample(
    logits: mx.array,
    u: mx.array,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> mx.array:
    """logits (M, V), u float32 (M,) -> int32 (M,); -1 if any logit of a row is NaN or infinite.

    temperature > 0. top_k: keep the k likeliest, 0: all; ties with the k-th stay. top_p: keep the
    likeliest that together reach p. min_p: keep those of at least p times the likeliest.
    """
    check_dtype("sample", "logits", logits)
    axes = check_shape("sample", "logits", logits, "M V")
    check_shape("sample", "u", u, "M", M=axes["M"])
    return _launch.backend().sample(
        logits, u, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )


def sample_ref(
    logits: npt.NDArray[Any],
    u: float,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    """One row (V,) in float64, by the book."""
    z = logits.astype(np.float64)
    if not np.isfinite(z).all():
        return -1
    p = np.exp((z - z.max()) / temperature)
    order = np.argsort(-p, kind="stable")
    if 0 < top_k < len(p):
        p = np.where(p >= p[order[top_k - 1]], p, 0)
    before = np.cumsum(p[order]) - p[order]
    least = p[order][before < top_p * p.sum()].min() if top_p < 1 else 0
    p = np.where((p >= least) & (p >= min_p * p.max()), p, 0)
    return int(np.searchsorted(np.cumsum(p), u * p.sum(), side="right"))


def sample_bytes(logits: mx.array) -> int:
    """Every logit read once."""
    return logits.nbytes


def on_device(
    logits: mx.array,
    u: mx.array,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> mx.array:
    """In MLX's ops, without a wait for the device."""
    z = logits.astype(mx.float32)
    finite = mx.isfinite(mx.sum(z, axis=-1))  # finite only if every term is
    z = keep_min_p(keep_top_p(keep_top_k(z * (1 / temperature), top_k), top_p), min_p)
    total = mx.cumsum(mx.softmax(z, axis=-1), axis=-1)
    below = total <= u[:, None] * total[:, -1:]
    return mx.where(finite, mx.sum(below, axis=-1).astype(mx.int32), -1)


def keep_top_k(logits: mx.array, k: int) -> mx.array:
    """All but the k largest become -inf; ties with the k-th stay. 0: nothing changes."""
    if not 0 < k < logits.shape[-1]:
        return logits
    kth = mx.min(mx.topk(logits, k, axis=-1), axis=-1, keepdims=True)
    return mx.where(logits >= kth, logits, -math.inf)


def keep_top_p(logits: mx.array, p: float) -> mx.array:
    """The smallest set of likeliest tokens whose probabilities reach p stays."""
    if p >= 1:
        return logits
    down = -mx.sort(-logits, axis=-1)
    probability = mx.softmax(down, axis=-1)
    before = mx.cumsum(probability, axis=-1) - probability
    # The first token always stays: nothing lies before it.
    least = mx.min(mx.where(before < p, down, math.inf), axis=-1, keepdims=True)
    return mx.where(logits >= least, logits, -math.inf)


def keep_min_p(logits: mx.array, p: float) -> mx.array:
    """Tokens of less than p times the largest probability become -inf."""
    if p <= 0:
        return logits
    least = mx.max(logits, axis=-1, keepdims=True) + math.log(p)
    return mx.where(logits >= least, logits, -math.inf)


def on_host(
    logits: mx.array,
    u: mx.array,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> mx.array:
    """In numpy: on a CPU the logits lie in host memory, and numpy sorts them 20 times faster."""
    rows = np.array(logits.astype(mx.float32))
    tokens = [
        _draw(z, float(v), temperature, top_k, top_p, min_p)
        for z, v in zip(rows, np.array(u), strict=True)
    ]
    return mx.array(tokens, mx.int32)


def _draw(
    z: npt.NDArray[np.float32],
    u: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> int:
    """One row (V,). Tokens that a filter drops are gone from `ids` before the costly steps."""
    most = z.max()
    if not np.isfinite(z.sum(dtype=np.float64)):
        return -1
    ids: Any = slice(None)
    if 0 < top_k < len(z):
        ids = np.flatnonzero(z >= np.partition(z, -top_k)[-top_k])
    p = np.exp((z[ids] - most) * np.float32(1 / temperature))
    if top_p < 1:
        whole = p.sum(dtype=np.float64)
        # All that are less than this sum to less than 1 - top_p: none of them is among the kept.
        down = np.sort(p[p >= (1 - top_p) * whole / len(p)])[::-1]
        at = np.searchsorted(np.cumsum(down, dtype=np.float64), top_p * whole)
        p[p < down[min(at, len(down) - 1)]] = 0
    if min_p > 0:
        p[p < min_p] = 0  # the largest is 1
    total = np.cumsum(p, dtype=np.float64)
    at = int(np.searchsorted(total, u * total[-1], side="right"))
    return at if isinstance(ids, slice) else int(ids[at])
