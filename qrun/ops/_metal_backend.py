"""The Metal backend: the ops of `_metal` in the form that `_launch` asks for.

What multiplies is decided by timings on the chip at hand (`_metal_tune`), where there are none by
the table in `_metal_geometry`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import mlx.core as mx

from qrun.ops import _metal, _metal_geometry, _metal_tune, _mlx
from qrun.ops._launch import Norm, Step, enqueued, zeros
from qrun.ops._metal_candidates import Shape
from qrun.ops._metal_ladder import ladder
from qrun.ops._metal_timings import Timings
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.sample import on_device

NAME = "metal"
QMV_ROWS = _metal_geometry.MAX_ROWS
PREFILL_ROWS = 512
GATHERS = False

argmax = _mlx.argmax
sample = on_device
rms_norm = _metal.rms_norm
rms_norm_parts = _mlx.rms_norm_parts
softcap = _mlx.softcap
gemm = _metal.gemm
once = enqueued
blank = zeros
attend = None
gather_qmm = _mlx.gather_qmm
route = _mlx.route
combine = _mlx.combine

__all__ = ["ladder"]  # for qrun.bench; the rest is `_launch.Backend`'s


def traced(step: Step) -> Step:
    return enqueued(mx.compile(step))


def pack(m: QuantizedMatrix, count: int) -> mx.array | None:
    return None


@cache
def timings() -> Timings:
    """This process's. Empty, so that the table decides, until a load asks for more."""
    return Timings.here()


TUNED_ROWS = (1, 512)  # of decode, and of a whole chunk of a prompt


def tune(
    step: Callable[[int], object], *, again: bool = False, show: Callable[[str], None]
) -> list[str]:
    """Time what multiplies in a model. step(rows) asks for all its products, result unused."""
    known = timings()
    known.read()
    with known.listening() as wanted:
        for rows in TUNED_ROWS:
            step(rows)
    return _metal_tune.tune(wanted, known, again=again, show=show)


def qmv(
    x: mx.array,
    m: QuantizedMatrix,
    *,
    norm: Norm | None,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    packed = cast(Any, m)
    shape = Shape(x.shape[0], packed, x.dtype, norm, bias, residual is not None, activation, scale)
    known = timings()
    if known.wanted is not None:
        known.wanted.setdefault(shape.key, []).append(shape)
    return known.product(shape)(
        x, packed, norm=norm, bias=bias, residual=residual, activation=activation, scale=scale
    )


qmm = qmv  # the candidates know which is which


def swiglu(gate_up: mx.array) -> mx.array:
    return _metal.swiglu(gate_up)


def embedding(ids: mx.array, m: QuantizedMatrix, *, dtype: mx.Dtype, scale: float) -> mx.array:
    rows = _metal.embedding(ids, cast(Any, m), dtype=dtype)
    return rows if scale == 1.0 else rows * scale


@cache
def writes_in_place() -> bool:
    """Whether what a kernel writes into its inputs stays, which MLX does not promise.

    Asked once a process: a cache that is not appended to would make plausible nonsense.
    """
    qkv, cache, turn = mx.ones((1, 1, 24)), mx.zeros((1, 1, 1, 8)), mx.ones((1, 4, 2))
    held = mx.zeros((1, 1, 1, 8))
    mx.eval(cache, held)
    at = mx.array([0, 0, 0, 0], mx.int32)
    q, _, held = _metal.rope(qkv, cache, held, at, turn, heads=1, kv_heads=1, head_dim=8)
    mx.eval(q)
    if bool(mx.all(held == 1).item()):
        return True
    warnings.warn(
        "this MLX does not let a kernel append to the cache: slower, it is copied", stacklevel=2
    )
    return False


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
    if not writes_in_place():
        return _mlx.rope(
            qkv, k_cache, v_cache, offset, table, heads=heads, q_norm=q_norm, k_norm=k_norm, eps=eps
        )
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
