"""attend: what attention does between its two products: `rope`, then `sdpa`, in one step.

A backend may have it as one kernel for a single new token, where the starts and ends of several
small kernels cost more than their work; everything else is the two ops after one another.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops.rope import check_rope, rope, rope_ref
from qrun.ops.sdpa import sdpa, sdpa_ref


def attend(
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
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[mx.array, mx.array, mx.array]:
    """qkv ((B*L), (H + 2*Hkv) * D), caches (B, Hkv, C, D), offset and table as in `rope`
    -> y ((B*L), H*D) in qkv's dtype, and both caches, appended to in place.

    scale, window, softcap: as in `sdpa`. One kernel may keep q in float32 where two round it to
    qkv's dtype in between.
    """
    own = _launch.backend().attend
    if own is not None and qkv.shape[0] == k_cache.shape[0]:
        check_rope(qkv, k_cache, v_cache, offset, table, heads, q_norm, k_norm, op="attend")
        if heads % k_cache.shape[1]:
            raise ValueError(
                f"attend: {heads} heads are no multiple of {k_cache.shape[1]} kv heads"
            )
        fused = own(
            qkv,
            k_cache,
            v_cache,
            offset,
            table,
            heads=heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            scale=scale,
            window=window,
            softcap=softcap,
        )
        if fused is not None:
            return fused
    q, k_cache, v_cache = rope(
        qkv, k_cache, v_cache, offset, table, heads=heads, q_norm=q_norm, k_norm=k_norm, eps=eps
    )
    y = sdpa(q, k_cache, v_cache, offset, scale=scale, window=window, softcap=softcap)
    return y, k_cache, v_cache


def attend_ref(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    v: npt.NDArray[Any],
    offset: int,
    inv_freq: npt.NDArray[np.float64],
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> npt.NDArray[np.float64]:
    """The same in float64. q (B, H, L, D) not yet rotated, k and v (B, Hkv, C, D) as cached."""
    q = rope_ref(q, np.arange(offset, offset + q.shape[2]), inv_freq)
    return sdpa_ref(q, k, v, offset, scale=scale, window=window, softcap=softcap)


def attend_bytes(qkv: mx.array, k_cache: mx.array, keys: int) -> int:
    """qkv and y once, keys and values of `keys` positions once; the new ones written once."""
    b, kv_heads, _, d = k_cache.shape
    each = b * kv_heads * d * k_cache.itemsize
    return 2 * qkv.nbytes - 2 * each + 2 * each * keys
