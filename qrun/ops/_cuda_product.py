"""The products as CUDA kernels. Shapes and meaning: qmv.py."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from qrun.ops import _cuda_driver as driver
from qrun.ops import _mlx
from qrun.ops._cuda_launch import (
    Constant,
    Recipe,
    Shape,
    alone,
    ceil_div,
    launch,
    literal,
    matrix,
    pointer,
    scheme_of,
)
from qrun.ops._cuda_rows import rms_norm
from qrun.ops._cuda_tiles import (
    SMS,
    MmaTile,
    QmvTile,
    WgmmaTile,
    mma_tile,
    qmv_tile,
    wgmma_tile,
)
from qrun.ops._launch import Arrays, Norm
from qrun.ops.matrix import QuantizedMatrix
from qrun.quantization import Quantization

ACTIVATIONS = {None: 0, "swiglu": 1, "geglu": 2}  # enum Activation of common/epilogue.cuh


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
    if tile.rows < x.shape[0] and alone() and generation() == 9 and x.dtype == m.scale_dtype:
        # x does not fit into shared memory: w would be read twice.
        wide = wgmma_tile(x.shape[0], m.n, m.k)
        return _qmm(x, m, wide, norm, bias, residual, activation, scale)
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
    weight, eps = norm or (None, 0.0)
    inputs = {"x": x, **matrix(m), "norm": weight, "bias": bias, "residual": residual}
    return launch(_qmv_recipe, inputs, tile, m.spec.group_size, eps, activation, scale)[0]


def _qmv_recipe(
    tile: QmvTile,
    group: int,
    eps: float,
    activation: str | None,
    scale: float,
    *,
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    norm: mx.array | None,
    bias: mx.array | None,
    residual: mx.array | None,
    **_: object,
) -> Recipe:
    (rows, k), n = x.shape, w.shape[0]
    epilogue, constants = epilogue_of(bias, residual, activation, scale)
    constants |= {"T": x.dtype, "S": scales.dtype, "GROUP": group, "M": tile.rows}
    constants |= {"WORDS": tile.words, "TAKE": tile.take, "WARPS": tile.warps}
    constants |= {"ROUNDS": tile.rounds(k)}
    constants["G"] = mx.float32 if norm is None else norm.dtype
    source = (
        "qrun::Qmv<T, S, GROUP, M, WORDS, TAKE, WARPS, ROUNDS>{x, w, scales, biases, x_shape[0], "
        f"w_shape[0], x_shape[1]}}.run({pointer('norm', norm, 'G')}, {literal(eps)}, {epilogue});"
    )
    return Recipe(
        "qmv/qmv.cuh",
        source,
        {"y": ((rows, n if activation is None else n // 2), x.dtype)},
        constants,
        (min(ceil_div(n, 16), tile.blocks * SMS), ceil_div(rows, tile.rows), 1),
        Shape(32 * tile.warps, tile.blocks, tile.shared(k, group)),
    )


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
        if x.dtype == mx.float32:
            y = _float32_gemm(x, w)
            return _mlx.epilogue(y * scale, bias, residual, activation)
        return _mlx.gemm(x, w, bias=bias, residual=residual, activation=activation, scale=scale)
    inputs = {"x": x, "w": w, "bias": bias, "residual": residual}
    return launch(_gemm_recipe, inputs, activation, scale)[0]


def _gemm_recipe(
    activation: str | None,
    scale: float,
    *,
    x: mx.array,
    w: mx.array,
    bias: mx.array | None,
    residual: mx.array | None,
) -> Recipe:
    rows, n = x.shape[0], w.shape[0]
    epilogue, constants = epilogue_of(bias, residual, activation, scale)
    return Recipe(
        "qmv/qmv_plain.cuh",
        f"qrun::qmv_plain<TM>(x, qrun::Dense<W>{{w, x_shape[1]}}, {epilogue}, x_shape[0], "
        "w_shape[0], x_shape[1]);",
        {"y": ((rows, n if activation is None else n // 2), x.dtype)},
        {"T": x.dtype, "W": w.dtype, "TM": 1 if rows == 1 else 4, **constants},
        (ceil_div(n, 8), ceil_div(rows, 1 if rows == 1 else 4), 1),
        Shape(128),
    )


def _float32_gemm(x: mx.array, w: mx.array) -> mx.array:
    """x (M, K), w (N, K) -> (M, N). MLX rounds float32 factors to TF32, to 11 bits: an error of
    1e-3. So both go in two parts, the upper 11 bits and the rest; what is lost begins at 2^-21.
    """
    return sum(
        (a @ b.T for a in _tf32_parts(x) for b in _tf32_parts(w)),
        mx.zeros((x.shape[0], w.shape[0])),
    )


def _tf32_parts(a: mx.array) -> Arrays:
    """What TF32 multiplies exactly, or nearly: their sum is a."""
    if a.dtype != mx.float32:
        return [a.astype(mx.float32)]  # 8 or 11 bits
    upper = (a.view(mx.uint32) & 0xFFFFE000).view(mx.float32)
    return [upper, a - upper]


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
    inputs = {"x": x, **matrix(m), "bias": bias, "residual": residual}
    return launch(_plain_recipe, inputs, m.spec, activation, scale)[0]


def _plain_recipe(
    spec: Quantization,
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
    tile = 1 if rows == 1 else 4
    scheme, constants = scheme_of(spec, scales.dtype, "x_shape[1]")
    epilogue, more = epilogue_of(bias, residual, activation, scale)
    return Recipe(
        "qmv/qmv_plain.cuh",
        f"qrun::qmv_plain<TM>(x, {scheme}, {epilogue}, x_shape[0], w_shape[0], x_shape[1]);",
        {"y": ((rows, n if activation is None else n // 2), x.dtype)},
        {"T": x.dtype, "TM": tile, **constants, **more},
        (ceil_div(n, 8), ceil_div(rows, tile), 1),
        Shape(128),
    )


def qmm_tile(rows: int, n: int, k: int, group: int, alike: bool = True) -> MmaTile | WgmmaTile:
    """alike: scales are of x's type."""
    if generation() != 9 or not alike:
        return mma_tile(rows, n, group)
    return wgmma_tile(rows, n, k)


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
        (ceil_div(rows, tile.bm) * tile.splits, ceil_div(n, tile.bn), 1),
        Shape(128 * tile.wn, tile.blocks, tile.shared, tile.splits),
    )
