"""sdpa: causal attention over the cache, softmax(q k^T * scale) v (Vaswani et al., 2017).

L new queries sit at positions offset .. offset+L-1; the cache holds keys and values of all
positions up to there. Query i sees key j if j <= i, and with a window w only if j > i - w.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape


def sdpa(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> mx.array:
    """q (B, H, L, D), caches (B, Hkv, C, D), offset as in rope -> ((B*L), H*D) in q's dtype.

    H is a multiple of Hkv. window 0: none. softcap c > 0: scores become c * tanh(score / c).
    Scores, softmax and sums in float32.
    """
    axes = check_shape("sdpa", "q", q, "B H L D")
    check_dtype("sdpa", "q", q)
    kv = check_shape("sdpa", "k_cache", k_cache, "B Hkv C D", B=axes["B"], D=axes["D"])
    check_shape("sdpa", "v_cache", v_cache, "B Hkv C D", **kv)
    if axes["H"] % kv["Hkv"]:
        raise ValueError(f"sdpa: {axes['H']} heads are no multiple of {kv['Hkv']} kv heads")
    check_dtype("sdpa", "offset", offset, mx.int32)
    check_shape("sdpa", "offset", offset, "P")
    return _launch.backend().sdpa(
        q, k_cache, v_cache, offset, scale=scale, window=window, softcap=softcap
    )


def sdpa_ref(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    v: npt.NDArray[Any],
    offset: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> npt.NDArray[np.float64]:
    """The same in float64."""
    b, h, length, d = q.shape
    total = offset + length
    group = h // k.shape[1]
    kk = np.repeat(k[:, :, :total].astype(np.float64), group, 1)
    vv = np.repeat(v[:, :, :total].astype(np.float64), group, 1)
    scores = q.astype(np.float64) @ kk.swapaxes(-1, -2) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    i, j = np.arange(offset, total)[:, None], np.arange(total)
    seen = (j <= i) & (j > i - window) if window else j <= i
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = p / p.sum(-1, keepdims=True) @ vv
    return out.swapaxes(1, 2).reshape(b * length, h * d)


def sdpa_bytes(q: mx.array, k_cache: mx.array, keys: int) -> int:
    """q and result once; keys and values of `keys` positions once, shared by a group of heads."""
    b, hkv, _, d = k_cache.shape
    return 2 * q.nbytes + 2 * b * hkv * keys * d * k_cache.itemsize
