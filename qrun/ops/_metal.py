"""The ops on Metal.

`NAME_call(...)` in _metal_product and _metal_rows say what would be launched, as data; an op here
launches it. `run` is who launches: MLX on a Mac; the tests pass an emulator, which so runs the very
same definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from qrun.ops import _metal_geometry as geometry
from qrun.ops._metal_call import Call, Run, launch
from qrun.ops._metal_product import Behind, Packed, gemm_call, qmm_call, qmv_call
from qrun.ops._metal_rows import (
    embedding_call,
    gated_call,
    rms_norm_call,
    rope_call,
    sdpa_decode_call,
    sdpa_merge_call,
    sdpa_prefill_call,
)

DECODE_TOKENS = 8  # new tokens up to which keys are read a query chunk at a time


# MLX hands a kernel arrays of fewer than 8 elements in another address space. With 16 rows of w,
# every array beside w has 8, pairs or not: fewer are filled up with zeros, and y is cut again.
ROWS = 16


@dataclass(frozen=True)
class _Filled:
    """A packed matrix filled up to ROWS."""

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    group_size: int
    mode: str
    k: int
    n: int = ROWS


def _down(a: mx.array) -> mx.array:
    """a (N, ...) with zeros down to ROWS."""
    return mx.pad(a, [(0, ROWS - a.shape[0])] + [(0, 0)] * (a.ndim - 1))


def _fill(m: Packed) -> Packed:
    if m.n >= ROWS:
        return m
    biases = None if m.biases is None else _down(m.biases)
    return _Filled(_down(m.w), _down(m.scales), biases, m.bits, m.group_size, m.mode, m.k)


def _product(call: Callable[[Behind], Call], behind: Behind, n: int, run: Run) -> mx.array:
    """Launches call(behind) for n rows of w, filled up to ROWS."""
    if n >= ROWS:
        (y,) = run(call(behind))
        return y
    (y,) = run(call(behind.filled(n, ROWS)))
    return y[:, : behind.columns(n)]


Norm = tuple[mx.array, float]  # weight (K,), eps


def qmv(
    x: mx.array,
    m: Packed,
    *,
    norm: Norm | None = None,
    shape: geometry.Rows | geometry.Wide | None = None,
    run: Run = launch,
    **behind: Any,
) -> mx.array:
    """y (M, N) = rms_norm(x) @ w.T, M <= 16, and what follows it: the fields of `Behind`."""
    filled = _fill(m)
    return _product(
        lambda behind: qmv_call(x, filled, behind, norm, shape), Behind(**behind), m.n, run
    )


def qmm(
    x: mx.array,
    m: Packed,
    *,
    norm: Norm | None = None,
    tile: geometry.Tile | None = None,
    run: Run = launch,
    **behind: Any,
) -> mx.array:
    """As qmv, for many rows. The norm is a pass of its own, short beside the product."""
    if norm is not None:
        x = rms_norm(x, *norm, run=run)
    filled = _fill(m)
    return _product(lambda behind: qmm_call(x, filled, behind, tile), Behind(**behind), m.n, run)


def gemm(
    x: mx.array,
    w: mx.array,
    *,
    tile: geometry.Tile | None = None,
    run: Run = launch,
    **behind: Any,
) -> mx.array:
    """As qmm, for w (N, K) that is not packed."""
    n = w.shape[0]
    filled = w if n >= ROWS else _down(w)
    return _product(lambda behind: gemm_call(x, filled, behind, tile), Behind(**behind), n, run)


def sdpa(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0,
    run: Run = launch,
) -> mx.array:
    """q (B, H, L, D) at positions offset .., caches (B, Hkv, C, D), to (B, L, H * D)."""
    arrays = (q, k_cache, v_cache, offset)
    if q.shape[2] > DECODE_TOKENS:
        (y,) = run(sdpa_prefill_call(*arrays, scale=scale, window=window, softcap=softcap))
        return y
    parts = run(sdpa_decode_call(*arrays, scale=scale, window=window, softcap=softcap))
    (y,) = parts if len(parts) == 1 else run(sdpa_merge_call(parts[0], parts[1], q.dtype))
    return y


def rope(
    qkv: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    table: mx.array,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm: mx.array | None = None,
    k_norm: mx.array | None = None,
    eps: float = 0,
    run: Run = launch,
) -> tuple[mx.array, mx.array, mx.array]:
    """q (B, H, L, D) and the caches, appended to in place: read them together with q."""
    (q,) = run(
        rope_call(
            qkv,
            k_cache,
            v_cache,
            offset,
            table,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
        )
    )
    return q, k_cache, v_cache


def rms_norm(
    x: mx.array,
    weight: mx.array,
    eps: float,
    residual: mx.array | None = None,
    centered: bool = False,
    *,
    run: Run = launch,
) -> mx.array:
    """x (..., K)."""
    (y,) = run(rms_norm_call(mx.reshape(x, (-1, x.shape[-1])), weight, eps, centered))
    y = mx.reshape(y, x.shape)
    return y if residual is None else residual + y


def embedding(ids: mx.array, m: Packed, *, dtype: mx.Dtype, run: Run = launch) -> mx.array:
    """ids (...) int32 to (..., K)."""
    (y,) = run(embedding_call(mx.flatten(ids), m, dtype))
    return mx.reshape(y, (*ids.shape, m.k))


def swiglu(gate_up: mx.array, *, activation: str = "swiglu", run: Run = launch) -> mx.array:
    """(M, 2N) interleaved to (M, N)."""
    (y,) = run(gated_call(gate_up, activation))
    return y
