"""rope: rotate q and k by their positions and append k and v to the cache (Su et al., 2021).

qkv ((B*L), (H + 2*Hkv) * D) is one row a token: H heads of q, then Hkv of k, then Hkv of v.
The angles come as a table of cosines and sines, so every scaling rule is data, not code:
`table` float32 (C, R/2, 2); the first R of D dims are rotated, dim i paired with dim i + R/2.
Optional per-head RMS norms of q and k go in front (qwen3).

k and v are written IN PLACE at positions offset .. offset+L-1 of caches (B, Hkv, C, D). The
returned caches share the given buffers and must replace them; order follows from data dependence.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape


def rope(
    qkv: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    table: mx.array,
    *,
    heads: int,
    q_norm: mx.array | None = None,
    k_norm: mx.array | None = None,
    eps: float = 0.0,
) -> tuple[mx.array, mx.array, mx.array]:
    """qkv as above -> q (B, H, L, D) in qkv's dtype, and both caches.

    offset: int32 (P,), whose first element counts (P = 4 keeps it out of host memory on CUDA).

    The caller keeps offset + L <= C: the kernels cannot raise.
    """
    check_rope(qkv, k_cache, v_cache, offset, table, heads, q_norm, k_norm)
    return _launch.backend().rope(
        qkv, k_cache, v_cache, offset, table, heads=heads, q_norm=q_norm, k_norm=k_norm, eps=eps
    )


def check_rope(
    qkv: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    table: mx.array,
    heads: int,
    q_norm: mx.array | None,
    k_norm: mx.array | None,
    *,
    op: str = "rope",
) -> None:
    """Raises for what rope, or attend, does not take."""
    axes = check_shape(op, "k_cache", k_cache, "B Hkv C D")
    check_shape(op, "v_cache", v_cache, "B Hkv C D", **axes)
    width = (heads + 2 * axes["Hkv"]) * axes["D"]
    rows = check_shape(op, "qkv", qkv, "BL W", W=width)["BL"]
    if rows % axes["B"]:
        raise ValueError(f"{op}: {rows} rows of qkv do not divide into {axes['B']} sequences")
    check_dtype(op, "qkv", qkv)
    check_dtype(op, "offset", offset, mx.int32)
    check_shape(op, "offset", offset, "P")
    check_dtype(op, "table", table, mx.float32)
    half = check_shape(op, "table", table, "T half pair", pair=2)["half"]
    if 2 * half > axes["D"]:
        raise ValueError(f"{op}: table rotates {2 * half} dims, the head has {axes['D']}")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_shape(op, name, weight, "D", D=axes["D"])


def rope_ref(
    x: npt.NDArray[Any], positions: npt.NDArray[Any], inv_freq: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """x (..., L, D) rotated by positions (L,) times inv_freq (R/2,), in float64."""
    half = len(inv_freq)
    angle = positions.astype(np.float64)[:, None] * inv_freq
    cos, sin = np.cos(angle), np.sin(angle)
    h = x.astype(np.float64)
    a, b = h[..., :half], h[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, h[..., 2 * half :]], -1)


def rope_bytes(qkv: mx.array) -> int:
    """qkv read once; q, k and v written once."""
    return 2 * qkv.nbytes
