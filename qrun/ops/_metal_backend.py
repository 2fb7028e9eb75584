"""The Metal backend: the ops of `_metal` in the form that `_launch` asks for.

Which geometry multiplies is decided by the table in `_metal_geometry`; `_metal_tune` can time the
candidates of a shape against MLX's own product on the chip at hand.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from qrun.ops import _metal, _metal_geometry, _mlx
from qrun.ops._launch import Norm, Step, enqueued
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.sample import on_device

NAME = "metal"
QMV_ROWS = _metal_geometry.MAX_ROWS
GATHERS = False

argmax = _mlx.argmax
sample = on_device
rms_norm = _metal.rms_norm
gemm = _metal.gemm
gather_qmm = _mlx.gather_qmm
route = _mlx.route
combine = _mlx.combine


def traced(step: Step) -> Step:
    return enqueued(mx.compile(step))


def pack(m: QuantizedMatrix, count: int) -> mx.array | None:
    return None


def qmv(x: mx.array, m: QuantizedMatrix, *, norm: Norm | None, **behind: Any) -> mx.array:
    return _metal.qmv(x, cast(Any, m), norm=norm, **behind)


def qmm(x: mx.array, m: QuantizedMatrix, *, norm: Norm | None, **behind: Any) -> mx.array:
    return _metal.qmm(x, cast(Any, m), norm=norm, **behind)


def swiglu(gate_up: mx.array) -> mx.array:
    return _metal.swiglu(gate_up)


def embedding(ids: mx.array, m: QuantizedMatrix, *, dtype: mx.Dtype, scale: float) -> mx.array:
    rows = _metal.embedding(ids, cast(Any, m), dtype=dtype)
    return rows if scale == 1.0 else rows * scale


def rope(
    qkv: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    table: mx.array,
    *,
    heads: int,
    q_norm: mx.array | None,
    k_norm: mx.array | None,
    eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    batch, kv_heads, _, head_dim = k_cache.shape
    return _metal.rope(
        qkv.reshape(batch, qkv.shape[0] // batch, qkv.shape[1]),
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


def sdpa(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> mx.array:
    y = _metal.sdpa(q, k_cache, v_cache, offset, scale=scale, window=window, softcap=softcap)
    return y.reshape(-1, y.shape[-1])
