"""The products as CUDA kernels. Shapes and meaning: qmv.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import ceil
from typing import NamedTuple

import mlx.core as mx

from qrun.ops import _cuda_driver as driver
from qrun.ops import _mlx
from qrun.ops._cuda_launch import (
    Constant,
    Shape,
    ceil_div,
    launch,
    literal,
    matrix,
    pointer,
    scheme_of,
)
from qrun.ops._cuda_rows import rms_norm
from qrun.ops._launch import Norm
from qrun.ops.matrix import QuantizedMatrix

ACTIVATIONS = {None: 0, "swiglu": 1, "geglu": 2}  # enum Activation of common/epilogue.cuh
SMS = 132  # of an H100 or H200; elsewhere the grid only fits less well
SHARED = 227 * 1024  # bytes of shared memory that the blocks of an SM share (sm_90)


@cache
def generation() -> int:
    """The first number of the compute capability; 9 (Hopper) alone has wgmma."""
    return driver.compute_capability()[0]


def epilogue_of(
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
    n: str = "w_shape[0]",
) -> tuple[str, dict[str, Constant]]:
    """The C++ expression of what follows a product, and its constants. n: rows of w."""
    return (
        f"qrun::Epilogue<T, B, ACTIVATION>{{y, {pointer('bias', bias, 'B')}, "
        f"{pointer('residual', residual, 'T')}, {literal(scale)}, {n}}}",
        {
            "B": mx.float32 if bias is None else bias.dtype,
            "ACTIVATION": ACTIVATIONS[activation],
        },
    )


def tensor_cores(x: mx.array, m: QuantizedMatrix) -> bool:
    return x.dtype != mx.float32 and m.spec.mode == "affine" and m.spec.bits == 4


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
    if not tensor_cores(x, m):
        return _plain(x, m, norm, bias, residual, activation, scale)
    tile = qmv_tile(x.shape[0], m.n, m.k, m.spec.group_size, m.scale_dtype.size)
    return _qmv(x, m, tile, norm, bias, residual, activation, scale)


def _qmv(
    x: mx.array,
    m: QuantizedMatrix,
    tile: QmvTile,
    norm: Norm | None,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    rows, group = x.shape[0], m.spec.group_size
    weight, eps = norm or (None, 0.0)
    epilogue, constants = epilogue_of(bias, residual, activation, scale)
    constants |= {"T": x.dtype, "S": m.scale_dtype, "GROUP": group, "M": tile.rows}
    constants |= {"WORDS": tile.words, "TAKE": tile.take, "WARPS": tile.warps}
    constants |= {"ROUNDS": tile.rounds(m.k)}
    constants["G"] = mx.float32 if weight is None else weight.dtype
    source = (
        "qrun::Qmv<T, S, GROUP, M, WORDS, TAKE, WARPS, ROUNDS>{x, w, scales, biases, x_shape[0], "
        f"w_shape[0], x_shape[1]}}.run({pointer('norm', weight, 'G')}, {literal(eps)}, {epilogue});"
    )
    columns = m.n if activation is None else m.n // 2
    return launch(
        "qmv/qmv.cuh",
        source,
        {"x": x, **matrix(m), "norm": weight, "bias": bias, "residual": residual},
        {"y": ((rows, columns), x.dtype)},
        constants,
        (min(ceil_div(m.n, 16), tile.blocks * SMS), ceil_div(rows, tile.rows), 1),
        Shape(32 * tile.warps, tile.blocks, tile.shared(m.k, group)),
    )[0]


class QmvTile(NamedTuple):
    """Of qmv.cuh: rows of x of a block, words a lane holds of a step, steps of a take, warps, and
    blocks that an SM shall hold.
    """

    rows: int
    words: int
    take: int
    warps: int
    blocks: int

    def rounds(self, k: int) -> int:
        return ceil_div(k, 32 * self.words * self.take * self.warps)

    def shared(self, k: int, group: int) -> int:
        """Bytes of shared memory: `SHARED` of the kernel."""
        takes, parts = self.warps * self.rounds(k), 32 * self.words // group
        x = (takes + 1) * self.take * self.words * self.rows * 64
        sums = takes * self.take * parts + 2 * self.warps * 16 + self.warps
        return x + sums * self.rows * 4


@cache
def qmv_tile(rows: int, n: int, k: int, group: int, scale_bytes: int = 2) -> QmvTile:
    """About 16 warps an SM with 8 loads under way each, takes dealt out evenly: the best of 460
    timings (kernels/qmv/README.md).
    """
    rows = ceil_div(rows, ceil_div(rows, 8))
    while True:
        tile = _qmv_tile(rows, n, k, group, scale_bytes)
        if tile.shared(k, group) <= SHARED // tile.blocks - 1024:
            return tile
        rows = ceil_div(rows, 2)  # x does not fit: several blocks read the same w


def _qmv_tile(rows: int, n: int, k: int, group: int, scale_bytes: int) -> QmvTile:
    # A load of 16 bytes spans two groups of 64, which costs half of the columns of x.
    words = 2 if rows > group // 16 and group < 128 else 4
    steps, step = ceil_div(k, 32 * words), 32 * words
    most = 4 if (steps >= 64 if words == 2 else _long(steps, n)) else 2
    if scale_bytes == 4:  # factors take as many registers as codes
        most = 2
    take = next(t for t in (4, 2, 1) if t <= most and (t == 1 or k % (step * t) == 0))
    takes = ceil_div(steps, take)
    widest = 28 if words == 4 and rows > 2 else 16
    warps = ceil_div(takes, ceil_div(takes, widest))
    blocks = max(1, min(4, 16 // warps))
    if words == 4 and rows <= 2 and takes > warps:
        blocks = 2
    return QmvTile(rows, words, take, warps, blocks)


def _long(steps: int, n: int) -> bool:
    """Whether takes of four steps leave enough of them, and not too many."""
    return 32 <= steps <= 64 or (steps >= 16 and n >= 8192)


def gemm(
    x: mx.array,
    w: mx.array,
    *,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    """Few rows by the plain kernel; many by the library that MLX calls."""
    rows, k = x.shape
    if rows > 16 or k % 8:
        return _mlx.gemm(x, w, bias=bias, residual=residual, activation=activation, scale=scale)
    epilogue, constants = epilogue_of(bias, residual, activation, scale)
    n = w.shape[0]
    return launch(
        "qmv/qmv_plain.cuh",
        f"qrun::qmv_plain<TM>(x, qrun::Dense<W>{{w, x_shape[1]}}, {epilogue}, x_shape[0], "
        "w_shape[0], x_shape[1]);",
        {"x": x, "w": w, "bias": bias, "residual": residual},
        {"y": ((rows, n if activation is None else n // 2), x.dtype)},
        {"T": x.dtype, "W": w.dtype, "TM": 1 if rows == 1 else 4, **constants},
        (ceil_div(n, 8), ceil_div(rows, 1 if rows == 1 else 4), 1),
        Shape(128),
    )[0]


def _plain(
    x: mx.array,
    m: QuantizedMatrix,
    norm: Norm | None,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    """Any format, any x, any number of rows; no tensor cores."""
    if norm is not None:
        x = rms_norm(x, *norm)
    rows, columns = x.shape[0], m.n if activation is None else m.n // 2
    tile = 1 if rows == 1 else 4
    scheme, constants = scheme_of(m, "x_shape[1]")
    epilogue, more = epilogue_of(bias, residual, activation, scale)
    return launch(
        "qmv/qmv_plain.cuh",
        f"qrun::qmv_plain<TM>(x, {scheme}, {epilogue}, x_shape[0], w_shape[0], x_shape[1]);",
        {"x": x, **matrix(m), "bias": bias, "residual": residual},
        {"y": ((rows, columns), x.dtype)},
        {"T": x.dtype, "TM": tile, **constants, **more},
        (ceil_div(m.n, 8), ceil_div(rows, tile), 1),
        Shape(128),
    )[0]


class MmaTile(NamedTuple):
    """Warps of a block of qmm_mma.cuh over n, m and k, each with 32 rows of w and tm rows of x."""

    tm: int
    wn: int
    wm: int
    wk: int

    @property
    def bm(self) -> int:
        return self.tm * self.wm

    @property
    def bn(self) -> int:
        return 32 * self.wn

    def stages(self, group: int) -> tuple[int, int]:
        """How many fit (four at most), and the bytes of shared memory."""
        units = 64 // min(group, 64)
        stage = self.wk * (self.bm * 128 + self.bn * 32 + units * self.bm * 4)
        count = min(4, SHARED // stage)
        # The sums at the end take the stages' place.
        return count, max(count * stage, self.wk * self.bm * (self.bn + 4) * 4)


class WgmmaTile(NamedTuple):
    """Of qmm_wgmma.cuh: rows of x of a block; its warpgroups, each with 64 rows of w; runs
    under way; blocks that an SM shall hold; blocks that share the runs of a tile.
    """

    bm: int
    wn: int
    stages: int
    blocks: int
    splits: int = 1

    @property
    def bn(self) -> int:
        return 64 * self.wn

    @property
    def shared(self) -> int:
        """The sums at the end take the stages' place; the place begins at a multiple of 1024."""
        stages = self.stages * self.bm * 256
        return max(stages + 16 * self.stages, self.bm * (self.bn + 4) * 4) + 1024


# What full SMs reach with a tile, TFLOP/s (kernels/qmm/README.md).
WGMMA_TILES = {
    WgmmaTile(16, 2, 8, 4): 130,
    WgmmaTile(32, 2, 6, 3): 215,
    WgmmaTile(32, 4, 6, 2): 215,
    WgmmaTile(64, 4, 6, 1): 440,
    WgmmaTile(128, 2, 3, 2): 570,
    WgmmaTile(256, 2, 3, 1): 620,
}


def qmm_tile(rows: int, n: int, k: int, group: int, alike: bool = True) -> MmaTile | WgmmaTile:
    """The quickest by an estimate. alike: scales are of x's type."""
    if generation() != 9 or not alike:
        return mma_tile(rows, n, group)
    return _wgmma_tile(rows, n, k)


@cache
def _wgmma_tile(rows: int, n: int, k: int) -> WgmmaTile:
    most = min(16, ceil_div(k, 256))  # every split has two runs

    def candidates() -> Iterator[WgmmaTile]:
        for tile in WGMMA_TILES:
            yield tile
            if ceil_div(rows, tile.bm) * ceil_div(n, tile.bn) < SMS * tile.blocks:
                yield from (tile._replace(splits=s) for s in range(2, most + 1))

    return min(candidates(), key=lambda tile: _microseconds(tile, rows, n, k))


def _microseconds(tile: WgmmaTile, rows: int, n: int, k: int) -> float:
    """Of a launch. Its numbers are fitted to 262 timings; what is chosen by them is within 11 % of
    the best one, on average within 2 %.
    """
    rate = WGMMA_TILES[tile._replace(splits=1)] * 1e6 / SMS  # flops a microsecond and SM
    run = tile.blocks * tile.bm * tile.bn * 2 * 128 / rate
    waves = ceil_div(rows, tile.bm) * ceil_div(n, tile.bn) * tile.splits / (SMS * tile.blocks)
    part = waves % 1
    work = (waves - part + (max(part, 0.8) if part else 0)) * ceil_div(
        ceil_div(k, 128), tile.splits
    )
    sums = tile.splits * tile.bm * tile.bn * 4  # bytes that the last block of a tile adds up
    return work * run + 2 * ceil(waves) + (2 + sums / 25e3 if tile.splits > 1 else 0)


def mma_tile(rows: int, n: int, group: int) -> MmaTile:
    """Few rows: narrow tiles, many blocks, warps that split K. Many: the widest tile.

    Groups of 32 need twice the factors in registers, so a warp takes half the rows of x.
    """
    widest = 32 if group == 32 else 64
    if rows <= 64:
        wide = n >= 32 * 4 * 132
        tm = min(widest, 16 if rows <= 16 else 32 if rows <= 32 else 64)
        wm = 2 if tm < 64 and rows > 32 else 1
        return MmaTile(tm, 4 if wide else 1, wm, (2 if wide else 8) // wm)
    return MmaTile(widest, 4, 2, 1)


def qmm(
    x: mx.array,
    m: QuantizedMatrix,
    *,
    norm: Norm | None,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    if not tensor_cores(x, m):
        return _plain(x, m, norm, bias, residual, activation, scale)
    tile = qmm_tile(x.shape[0], m.n, m.k, m.spec.group_size, x.dtype == m.scale_dtype)
    return _qmm(x, m, tile, norm, bias, residual, activation, scale)


def _qmm(
    x: mx.array,
    m: QuantizedMatrix,
    tile: MmaTile | WgmmaTile,
    norm: Norm | None,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    if isinstance(tile, WgmmaTile):
        arranged, done = _arrange(x, norm, tile, m.n)
        return _qmm_wgmma(arranged, done, x, m, tile, bias, residual, activation, scale)
    prepared, sums = _prepare(x, norm, m.spec.group_size, tile.bm)
    return _qmm_mma(prepared, sums, m, tile, bias, residual, activation, scale)


def _prepare(x: mx.array, norm: Norm | None, group: int, bm: int) -> list[mx.array]:
    """x normed and permuted, (M, K up to 64s); the sums of its units, (units, M up to bms)."""
    rows, k = x.shape
    weight, eps = norm or (None, 0.0)
    pk, unit = ceil_div(k, 64) * 64, min(group, 64)
    return launch(
        "qmm/qmm_prepare.cuh",
        f"qrun::qmm_prepare<U>(x, {pointer('norm', weight, 'G')}, {literal(eps)}, out, sums, "
        f"x_shape[1], (x_shape[1] + 63) / 64 * 64, (x_shape[0] + {bm - 1}) / {bm} * {bm});",
        {"x": x, "norm": weight},
        {"out": ((rows, pk), x.dtype), "sums": ((pk // unit, ceil_div(rows, bm) * bm), mx.float32)},
        {"T": x.dtype, "U": unit, "G": mx.float32 if weight is None else weight.dtype},
        (rows, 1, 1),
        Shape(min(512, ceil_div(pk, 256) * 32)),
    )


def _arrange(x: mx.array, norm: Norm | None, tile: WgmmaTile, n: int) -> list[mx.array]:
    """x normed and arranged for wgmma, (runs of 128 k, 2, M up to bms, 64); a zero a tile."""
    rows, k = x.shape
    weight, eps = norm or (None, 0.0)
    runs, pm = ceil_div(k, 128), ceil_div(rows, tile.bm) * tile.bm
    tiles = ceil_div(rows, tile.bm) * ceil_div(n, tile.bn) if tile.splits > 1 else 1
    return launch(
        "qmm/qmm_arrange.cuh",
        f"qrun::qmm_arrange(x, nullptr, {pointer('norm', weight, 'G')}, {literal(eps)}, out, done, "
        f"{tiles}, x_shape[1], (x_shape[0] + {tile.bm - 1}) / {tile.bm} * {tile.bm});",
        {"x": x, "norm": weight},
        {"out": ((runs, 2, pm, 64), x.dtype), "done": ((tiles,), mx.int32)},
        {"G": mx.float32 if weight is None else weight.dtype},
        (rows, 1, 1),
        Shape(min(512, ceil_div(runs * 16, 32) * 32)),
    )


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
    rows, columns = x.shape[0], m.n if activation is None else m.n // 2
    epilogue, constants = epilogue_of(bias, residual, activation, scale)
    constants |= {"T": x.dtype, "S": m.scale_dtype, "GROUP": m.spec.group_size}
    stages, shared = tile.stages(m.spec.group_size)
    constants |= {"TM": tile.tm, "WN": tile.wn, "WM": tile.wm, "WK": tile.wk, "STAGES": stages}
    return launch(
        "qmm/qmm_mma.cuh",
        "qrun::QmmMma<T, S, GROUP, TM, WN, WM, WK, STAGES>{x, sums, w, scales, biases, x_shape[0], "
        f"w_shape[0], w_shape[1] * 8, x_shape[1], sums_shape[1]}}.run({epilogue});",
        {"x": x, "sums": sums, **matrix(m), "bias": bias, "residual": residual},
        {"y": ((rows, columns), x.dtype)},
        constants,
        (ceil_div(m.n, tile.bn), ceil_div(rows, tile.bm), 1),
        Shape(32 * tile.wn * tile.wm * tile.wk, 1, shared),
    )[0]


def _qmm_wgmma(
    arranged: mx.array,
    done: mx.array,
    x: mx.array,  # for its number of rows
    m: QuantizedMatrix,
    tile: WgmmaTile,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    rows, columns = x.shape[0], m.n if activation is None else m.n // 2
    across, along = ceil_div(rows, tile.bm), ceil_div(m.n, tile.bn)
    epilogue, constants = epilogue_of(bias, residual, activation, scale)
    constants |= {"T": x.dtype, "GROUP": m.spec.group_size, "BM": tile.bm, "WN": tile.wn}
    constants |= {"STAGES": tile.stages, "SPLITS": tile.splits}
    sums = across * along * tile.splits * tile.bm * tile.bn if tile.splits > 1 else 4
    return launch(
        "qmm/qmm_wgmma.cuh",
        "qrun::QmmWgmma<T, GROUP, BM, WN, STAGES, SPLITS>{arranged, w, scales, biases, "
        "reinterpret_cast<float4*>(parts), const_cast<int*>(done), x_shape[0], w_shape[0], "
        f"w_shape[1] * 8, arranged_shape[2]}}.run({epilogue});",
        {
            "x": x,
            "arranged": arranged,
            "done": done,
            **matrix(m),
            "bias": bias,
            "residual": residual,
        },
        {"y": ((rows, columns), x.dtype), "parts": ((sums,), mx.float32)},
        constants,
        (across, along, tile.splits),
        Shape(128 * tile.wn, tile.blocks, tile.shared),
    )[0]
