"""The ops as CUDA kernels, for compute capability 8.0 and later. Shapes and meaning: the op files."""

from __future__ import annotations

import mlx.core as mx

from qrun.ops._cuda_launch import Constant, Shape, ceil_div, launch, literal, pointer
from qrun.ops._launch import Norm
from qrun.ops.matrix import QuantizedMatrix

NAME = "cuda"
COMPILES = True
QMV_ROWS = 16

ACTIVATIONS = {None: 0, "swiglu": 1, "geglu": 2}  # enum Activation of common/epilogue.cuh
MICRO = {"mxfp4": 0, "nvfp4": 1, "mxfp8": 2}  # enum Micro of common/dequantize.cuh
SHARED = 227 * 1024  # bytes of shared memory that the blocks of an SM share (sm_90)


def pack(m: QuantizedMatrix) -> mx.array | None:
    return None


# --- products -------------------------------------------------------------------------------------


def _matrix(m: QuantizedMatrix) -> dict[str, mx.array | None]:
    if m.w is None or m.scales is None:
        raise ValueError("this matrix was packed for another backend")
    return {"w": m.w, "scales": m.scales, "biases": m.biases}


def _scheme(m: QuantizedMatrix, k: str) -> tuple[str, dict[str, Constant]]:
    """The C++ expression of a matrix of any format, and its constants."""
    if m.spec.mode != "affine":
        return f"qrun::MicroScaled<MODE>{{w, scales, {k}}}", {"MODE": MICRO[m.spec.mode]}
    return (
        f"qrun::Affine<S, BITS, GROUP>{{w, scales, biases, {k}}}",
        {"S": m.scale_dtype, "BITS": m.spec.bits, "GROUP": m.spec.group_size},
    )


def _epilogue(
    bias: mx.array | None, residual: mx.array | None, activation: str | None, scale: float
) -> tuple[str, dict[str, Constant]]:
    """The C++ expression of what follows a product, and its constants."""
    return (
        f"qrun::Epilogue<T, B, ACTIVATION>{{y, {pointer('bias', bias, 'B')}, "
        f"{pointer('residual', residual, 'T')}, {literal(scale)}, w_shape[0]}}",
        {
            "B": mx.float32 if bias is None else bias.dtype,
            "ACTIVATION": ACTIVATIONS[activation],
        },
    )


def _tensor_cores(x: mx.array, m: QuantizedMatrix) -> bool:
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
    if not _tensor_cores(x, m):
        return _plain(x, m, norm, bias, residual, activation, scale)
    rows, group = x.shape[0], m.spec.group_size
    warps, blocks, chunk, shared = qmv_geometry(rows, m.k, group)
    weight, eps = norm or (None, 0.0)
    epilogue, constants = _epilogue(bias, residual, activation, scale)
    constants |= {"T": x.dtype, "S": m.scale_dtype, "GROUP": group, "M": rows, "WARPS": warps}
    constants["G"] = mx.float32 if weight is None else weight.dtype
    source = (
        "qrun::Qmv<T, S, GROUP, M, WARPS>{x, w, scales, biases, w_shape[0], x_shape[1], "
        f"{chunk}}}.run({pointer('norm', weight, 'G')}, {literal(eps)}, {epilogue});"
    )
    columns = m.n if activation is None else m.n // 2
    return launch(
        "qmv/qmv.cuh",
        source,
        {"x": x, **_matrix(m), "norm": weight, "bias": bias, "residual": residual},
        {"y": ((rows, columns), x.dtype)},
        constants,
        (ceil_div(m.n, 16), 1, 1),
        Shape(32 * warps, blocks, shared),
    )[0]


def qmv_geometry(rows: int, k: int, group: int) -> tuple[int, int, int, int]:
    """Warps a block, blocks an SM, k of x held in shared memory at a time, bytes of it.

    Rows of x cost registers: eight sums and four totals a lane for each pass over the columns of
    an mma (qmv.cuh).
    """
    columns = 8 * group // 128
    passes = ceil_div(rows, columns)
    if passes == 1:
        warps, blocks = 16, 2
    else:
        warps, blocks = 8, 3 if passes == 2 else 2 if passes <= 4 else 1
    steps = ceil_div(k, 128)
    while warps > 4 and warps // 2 >= steps:
        warps, blocks = warps // 2, blocks * 2

    def needed(chunk: int) -> int:
        held = chunk * rows * 2 + chunk // group * passes * columns * 4 + rows * 4
        return max(held, warps * rows * 16 * 4)

    limit, parts = SHARED // blocks - 2048, 1
    while needed(ceil_div(steps, parts) * 128) > limit:
        parts += 1
    chunk = ceil_div(steps, parts) * 128
    return warps, blocks, chunk, needed(chunk)


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
    scheme, constants = _scheme(m, "x_shape[1]")
    epilogue, more = _epilogue(bias, residual, activation, scale)
    return launch(
        "qmv/qmv_plain.cuh",
        f"qrun::qmv_plain<TM>(x, {scheme}, {epilogue}, x_shape[0], w_shape[0], x_shape[1]);",
        {"x": x, **_matrix(m), "bias": bias, "residual": residual},
        {"y": ((rows, columns), x.dtype)},
        {"T": x.dtype, "TM": tile, **constants, **more},
        (ceil_div(m.n, 8), ceil_div(rows, tile), 1),
        Shape(128),
    )[0]


qmm = qmv


# --- the small ops --------------------------------------------------------------------------------


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    rows, k = x.shape
    vec = 8 if k % 8 == 0 else 1
    threads = min(1024, ceil_div(ceil_div(k, vec), 32) * 32)
    return launch(
        "rms_norm/rms_norm.cuh",
        f"qrun::rms_norm<VEC>(x, weight, y, {literal(eps)}, x_shape[1]);",
        {"x": x, "weight": weight},
        {"y": (x.shape, x.dtype)},
        {"VEC": vec},
        (rows, 1, 1),
        Shape(threads),
    )[0]
