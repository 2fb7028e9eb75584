"""The products as CUDA kernels: which one, and those for few rows. Shapes and meaning: qmv.py."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from qrun.ops import _cuda_driver as driver
from qrun.ops import _mlx
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
    scheme_of,
)
from qrun.ops._cuda_qmm import by_tile
from qrun.ops._cuda_rows import rms_norm
from qrun.ops._cuda_tiles import (
    LONGEST,
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


@cache
def generation() -> int:
    """The first number of the compute capability; 9 (Hopper) alone has wgmma."""
    return driver.compute_capability()[0]


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
    if not tensor_cores(x, m) or m.k > LONGEST:
        return _plain(x, m, norm, bias, residual, activation, scale)
    tile = few_tile(x, m, norm)
    if tile.rows < x.shape[0] and alone():  # x does not fit: w would be read twice
        wide = qmm_tile(x.shape[0], m.n, m.k, m.spec.group_size, x.dtype == m.scale_dtype)
        if isinstance(wide, WgmmaTile):
            return by_tile(x, m, wide, norm, bias, residual, activation, scale)
    return _qmv(x, m, tile, norm, bias, residual, activation, scale)


def few_tile(x: mx.array, m: QuantizedMatrix, norm: Norm | None) -> QmvTile:
    """Clusters are not for MLX to launch, nor for norms, which want all of a row."""
    alike, clusters = x.dtype == m.scale_dtype, generation() == 9 and alone() and norm is None
    shape = (x.shape[0], m.n, m.k, m.spec.group_size)
    return qmv_tile(*shape, m.scale_dtype.size, alike, clusters, norm is not None)


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
    constants |= {**tile.arguments, "ROUNDS": tile.rounds(k)}
    constants["G"] = mx.float32 if norm is None else norm.dtype
    source = (
        "qrun::Qmv<T, S, GROUP, M, TAKE, WARPS, ROUNDS, TEAMS, AHEAD, DEQUANTIZED, SPLITS>{x, w, "
        "scales, biases, x_shape[0], w_shape[0], x_shape[1]}.run("
        f"{pointer('norm', norm, 'G')}, {literal(eps)}, {epilogue});"
    )
    return Recipe(
        "qmv/qmv.cuh",
        source,
        {"y": ((rows, n if activation is None else n // 2), x.dtype)},
        constants,
        (tile.clusters(n) * tile.splits, ceil_div(rows, tile.rows), 1),
        Shape(tile.threads, tile.blocks, tile.shared(n, k, group), tile.splits),
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
    if x.shape[0] <= 16 and m.k <= LONGEST:
        few = few_tile(x, m, norm)
        if few.rows >= x.shape[0]:
            return _qmv(x, m, few, norm, bias, residual, activation, scale)
    tile = qmm_tile(x.shape[0], m.n, m.k, m.spec.group_size, x.dtype == m.scale_dtype)
    return by_tile(x, m, tile, norm, bias, residual, activation, scale)
