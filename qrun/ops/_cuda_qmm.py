"""Many rows on tensor cores, as CUDA kernels: x is put in order, then multiplied."""

from __future__ import annotations

import mlx.core as mx

from qrun.ops._cuda_launch import (
    Recipe,
    Shape,
    alone,
    ceil_div,
    epilogue_of,
    launch,
    literal,
    matrix,
    pointer,
)
from qrun.ops._cuda_tiles import MmaTile, WgmmaTile
from qrun.ops._launch import Norm
from qrun.ops.matrix import QuantizedMatrix


def by_tile(
    x: mx.array,
    m: QuantizedMatrix,
    tile: MmaTile | WgmmaTile,
    norm: Norm | None,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    """qmm (qmv.py says what that is) by this tile, x and scales being right for it."""
    if isinstance(tile, WgmmaTile):
        if not alone():
            tile = tile._replace(splits=1)  # they are a cluster
        arranged = _arrange(x, norm, tile)
        return _qmm_wgmma(arranged, x, m, tile, bias, residual, activation, scale)
    prepared, sums = _prepare(x, norm, m.spec.group_size, tile.bm)
    return _qmm_mma(prepared, sums, m, tile, bias, residual, activation, scale)


def _prepare(x: mx.array, norm: Norm | None, group: int, bm: int) -> list[mx.array]:
    """x normed and permuted, (M, K up to 64s); the sums of its units, (units, M up to bms)."""
    weight, eps = norm or (None, 0.0)
    return launch(_prepare_recipe, {"x": x, "norm": weight}, group, bm, eps)


def _prepare_recipe(
    group: int, bm: int, eps: float, *, x: mx.array, norm: mx.array | None
) -> Recipe:
    rows, k = x.shape
    pk, unit = ceil_div(k, 64) * 64, min(group, 64)
    return Recipe(
        "qmm/qmm_prepare.cuh",
        f"qrun::qmm_prepare<U>(x, {pointer('norm', norm, 'G')}, {literal(eps)}, out, sums, "
        f"x_shape[1], (x_shape[1] + 63) / 64 * 64, (x_shape[0] + {bm - 1}) / {bm} * {bm});",
        {"out": ((rows, pk), x.dtype), "sums": ((pk // unit, ceil_div(rows, bm) * bm), mx.float32)},
        {"T": x.dtype, "U": unit, "G": mx.float32 if norm is None else norm.dtype},
        (rows, 1, 1),
        Shape(min(512, ceil_div(pk, 256) * 32)),
    )


def _arrange(x: mx.array, norm: Norm | None, tile: WgmmaTile) -> mx.array:
    """x normed and arranged for wgmma, (runs of 128 k, 2, M up to bms, 64)."""
    weight, eps = norm or (None, 0.0)
    return launch(_arrange_recipe, {"x": x, "norm": weight}, tile.bm, eps)[0]


def _arrange_recipe(bm: int, eps: float, *, x: mx.array, norm: mx.array | None) -> Recipe:
    rows, k = x.shape
    runs, pm = ceil_div(k, 128), ceil_div(rows, bm) * bm
    return Recipe(
        "qmm/qmm_arrange.cuh",
        f"qrun::qmm_arrange(x, nullptr, {pointer('norm', norm, 'G')}, {literal(eps)}, out, "
        f"x_shape[1], (x_shape[0] + {bm - 1}) / {bm} * {bm});",
        {"out": ((runs, 2, pm, 64), x.dtype)},
        {"G": mx.float32 if norm is None else norm.dtype},
        *arrange_grid(rows, runs),
    )


def arrange_grid(rows: int, runs: int) -> tuple[tuple[int, int, int], Shape]:
    """Of qmm_arrange: a thread has 8 elements of a row."""
    threads = min(256, ceil_div(runs * 16, 32) * 32)
    return (rows, ceil_div(runs * 16, threads), 1), Shape(threads)


def _qmm_mma(
    x: mx.array,
    sums: mx.array,
    m: QuantizedMatrix,
    tile: MmaTile,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    inputs = {"x": x, "sums": sums, **matrix(m), "bias": bias, "residual": residual}
    return launch(_mma_recipe, inputs, tile, m.spec.group_size, activation, scale)[0]


def _mma_recipe(
    tile: MmaTile,
    group: int,
    activation: str | None,
    scale: float,
    *,
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    bias: mx.array | None,
    residual: mx.array | None,
    **_: object,
) -> Recipe:
    rows, n = x.shape[0], w.shape[0]
    epilogue, constants = epilogue_of(bias, residual, activation, scale)
    constants |= {"T": x.dtype, "S": scales.dtype, "GROUP": group}
    stages, shared = tile.stages(group)
    constants |= {"TM": tile.tm, "WN": tile.wn, "WM": tile.wm, "WK": tile.wk, "STAGES": stages}
    return Recipe(
        "qmm/qmm_mma.cuh",
        "qrun::QmmMma<T, S, GROUP, TM, WN, WM, WK, STAGES>{x, sums, w, scales, biases, x_shape[0], "
        f"w_shape[0], w_shape[1] * 8, x_shape[1], sums_shape[1]}}.run({epilogue});",
        {"y": ((rows, n if activation is None else n // 2), x.dtype)},
        constants,
        (ceil_div(n, tile.bn), ceil_div(rows, tile.bm), 1),
        Shape(32 * tile.wn * tile.wm * tile.wk, 1, shared),
    )


def _qmm_wgmma(
    arranged: mx.array,
    x: mx.array,  # for its number of rows
    m: QuantizedMatrix,
    tile: WgmmaTile,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    inputs = {"x": x, "arranged": arranged, **matrix(m), "bias": bias, "residual": residual}
    return launch(_wgmma_recipe, inputs, tile, m.spec.group_size, activation, scale)[0]


def _wgmma_recipe(
    tile: WgmmaTile,
    group: int,
    activation: str | None,
    scale: float,
    *,
    x: mx.array,
    w: mx.array,
    bias: mx.array | None,
    residual: mx.array | None,
    **_: object,
) -> Recipe:
    rows, n = x.shape[0], w.shape[0]
    epilogue, constants = epilogue_of(bias, residual, activation, scale)
    constants |= {"T": x.dtype, "GROUP": group, "BM": tile.bm, "WN": tile.wn}
    constants |= {"STAGES": tile.stages, "SPLITS": tile.splits, "AHEAD": tile.ahead}
    return Recipe(
        "qmm/qmm_wgmma.cuh",
        "qrun::QmmWgmma<T, GROUP, BM, WN, STAGES, SPLITS, AHEAD>{arranged, w, scales, biases, "
        f"x_shape[0], w_shape[0], w_shape[1] * 8, arranged_shape[2]}}.run({epilogue});",
        {"y": ((rows, n if activation is None else n // 2), x.dtype)},
        constants,
        (tile.grid(rows, n, w.shape[1] * 8), 1, 1),
        Shape(128 * tile.wn, tile.blocks, tile.shared, tile.splits),
    )
