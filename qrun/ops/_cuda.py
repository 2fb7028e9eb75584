"""The ops as CUDA kernels, for compute capability 8.0 and later. Shapes and meaning: the op files."""

from __future__ import annotations

from typing import NamedTuple

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
    tile = qmv_tile(x.shape[0], m.k, m.spec.group_size)
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
    chunk, shared = tile.chunk(rows, m.k, group)
    weight, eps = norm or (None, 0.0)
    epilogue, constants = _epilogue(bias, residual, activation, scale)
    constants |= {"T": x.dtype, "S": m.scale_dtype, "GROUP": group, "M": rows}
    constants |= {"WARPS": tile.warps, "AHEAD": tile.ahead}
    constants["G"] = mx.float32 if weight is None else weight.dtype
    source = (
        "qrun::Qmv<T, S, GROUP, M, WARPS, AHEAD>{x, w, scales, biases, w_shape[0], x_shape[1], "
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
        Shape(32 * tile.warps, tile.blocks, shared),
    )[0]


class QmvTile(NamedTuple):
    """Warps of a block of qmv.cuh, blocks an SM shall hold, steps that a warp loads together."""

    warps: int
    blocks: int
    ahead: int

    def chunk(self, rows: int, k: int, group: int) -> tuple[int, int]:
        """k of x held in shared memory at a time, and the bytes of shared memory."""
        columns = 8 * group // 128
        sums = ceil_div(rows, columns) * columns
        steps = ceil_div(k, 128)

        def needed(chunk: int) -> int:
            held = chunk * rows * 2 + chunk // group * sums * 4 + rows * 4
            return max(held, self.warps * rows * 16 * 4)

        limit, parts = SHARED // self.blocks - 2048, 1
        while needed(ceil_div(steps, parts) * 128) > limit:
            parts += 1
        chunk = ceil_div(steps, parts) * 128
        return chunk, needed(chunk)


def qmv_tile(rows: int, k: int, group: int) -> QmvTile:
    """Each pass over the columns of an mma costs twelve registers a lane (qmv.cuh)."""
    passes, steps = ceil_div(rows, 8 * group // 128), ceil_div(k, 128)
    warps, blocks = (16, 2) if passes == 1 else (8, 2) if passes <= 4 else (8, 1)
    while warps > 4 and warps // 2 >= steps:
        warps, blocks = warps // 2, blocks * 2
    return QmvTile(warps, blocks, 2)


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
    if not _tensor_cores(x, m):
        return _plain(x, m, norm, bias, residual, activation, scale)
    tile = mma_tile(x.shape[0], m.n, m.spec.group_size)
    prepared, sums = _prepare(x, norm, m.spec.group_size, tile.bm)
    return _qmm_mma(prepared, sums, m, tile, bias, residual, activation, scale)


def _prepare(x: mx.array, norm: Norm | None, group: int, bm: int) -> list[mx.array]:
    """x normed and permuted, (M, K to a multiple of 64); sums of its units (units, M to one of bm)."""
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
    epilogue, constants = _epilogue(bias, residual, activation, scale)
    constants |= {"T": x.dtype, "S": m.scale_dtype, "GROUP": m.spec.group_size}
    stages, shared = tile.stages(m.spec.group_size)
    constants |= {"TM": tile.tm, "WN": tile.wn, "WM": tile.wm, "WK": tile.wk, "STAGES": stages}
    return launch(
        "qmm/qmm_mma.cuh",
        "qrun::QmmMma<T, S, GROUP, TM, WN, WM, WK, STAGES>{x, sums, w, scales, biases, x_shape[0], "
        f"w_shape[0], w_shape[1] * 8, x_shape[1], sums_shape[1]}}.run({epilogue});",
        {"x": x, "sums": sums, **_matrix(m), "bias": bias, "residual": residual},
        {"y": ((rows, columns), x.dtype)},
        constants,
        (ceil_div(m.n, tile.bn), ceil_div(rows, tile.bm), 1),
        Shape(32 * tile.wn * tile.wm * tile.wk, 1, shared),
    )[0]


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


def swiglu(gate_up: mx.array) -> mx.array:
    rows, columns = gate_up.shape
    count = rows * columns // 2
    return launch(
        "swiglu/swiglu.cuh",
        "qrun::swiglu(gate_up, y, gate_up_shape[0] * (gate_up_shape[1] / 2LL));",
        {"gate_up": gate_up},
        {"y": ((rows, columns // 2), gate_up.dtype)},
        {},
        (ceil_div(count, 256), 1, 1),
        Shape(256),
    )[0]


def embedding(ids: mx.array, m: QuantizedMatrix, *, dtype: mx.Dtype, scale: float) -> mx.array:
    scheme, constants = _scheme(m, str(m.k))
    return launch(
        "embedding/embedding.cuh",
        f"qrun::embedding(ids, {scheme}, y, {literal(scale)}, w_shape[0], {m.k});",
        {"ids": ids, **_matrix(m)},
        {"y": ((ids.size, m.k), dtype)},
        constants,
        (ceil_div(m.k, 8 * 64), ids.size, 1),
        Shape(64),
    )[0]


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
    """The caches are written in place: they must be contiguous, as `Cache` makes them.

    MLX runs kernels of one evaluation in any order that their inputs and outputs allow, and a
    write into an input does not count. q does: what reads the caches for these tokens takes q too.
    Between two calls that append to the same cache the first one's results must be evaluated.
    """
    batch, kv_heads, _, d = k_cache.shape
    length = qkv.shape[0] // batch
    constants: dict[str, Constant] = {"T": qkv.dtype, "C": k_cache.dtype}
    constants["QN"] = mx.float32 if q_norm is None else q_norm.dtype
    constants["KN"] = mx.float32 if k_norm is None else k_norm.dtype
    source = (
        f"qrun::Rope<T, C, QN, KN>{{qkv, offset, table, {pointer('q_norm', q_norm, 'QN')}, "
        f"{pointer('k_norm', k_norm, 'KN')}, {literal(eps)}, q, const_cast<C*>(k_cache), "
        f"const_cast<C*>(v_cache), {heads}, {kv_heads}, qkv_shape[0] / {batch}, {d}, {table.shape[1]}, "
        "k_cache_shape[2]}.run();"
    )
    arrays = {"qkv": qkv, "k_cache": k_cache, "v_cache": v_cache, "offset": offset, "table": table}
    q = launch(
        "rope/rope.cuh",
        source,
        {**arrays, "q_norm": q_norm, "k_norm": k_norm},
        {"q": ((batch, heads, length, d), qkv.dtype)},
        constants,
        (ceil_div(heads + 2 * kv_heads, 4), batch * length, 1),
        Shape(128),
    )[0]
    k_cache, v_cache = mx.depends([k_cache, v_cache], [q])
    return q, k_cache, v_cache


# --- attention ------------------------------------------------------------------------------------


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
    arrays: dict[str, mx.array | None] = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "offset": offset,
    }
    sizes = f"{literal(scale)}, {literal(softcap)}, {window}, q_shape[1], k_cache_shape[1], "
    sizes += "q_shape[2], k_cache_shape[2]"
    d, same = q.shape[3], q.dtype == k_cache.dtype == v_cache.dtype != mx.float32
    if q.shape[2] > 8 and same and d % 16 == 0 and d <= 256:
        return _sdpa_prefill(arrays, q, sizes)
    return _sdpa_decode(arrays, q, k_cache, sizes)


def _sdpa_prefill(arrays: dict[str, mx.array | None], q: mx.array, sizes: str) -> mx.array:
    batch, heads, length, d = q.shape
    keys = 64 if d <= 128 else 32
    return launch(
        "sdpa/sdpa_prefill.cuh",
        f"qrun::SdpaPrefill<T, D, BK>{{q, k_cache, v_cache, offset, y, {sizes}}}.run();",
        arrays,
        {"y": ((batch * length, heads * d), q.dtype)},
        {"T": q.dtype, "D": d, "BK": keys},
        (ceil_div(length, 64), heads, batch),
        Shape(128, 1, 2 * 2 * keys * (d + 8) * 2),
    )[0]


def _sdpa_decode(
    arrays: dict[str, mx.array | None], q: mx.array, k_cache: mx.array, sizes: str
) -> mx.array:
    batch, heads, length, d = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    alike = heads // kv_heads * length  # queries that share a key
    rows, warps = min(alike, 4 if d <= 128 else 2 if d <= 256 else 1), 4
    vec = next(v for v in (8, 4, 2, 1) if d % v == 0)
    blocks = batch * kv_heads * ceil_div(alike, rows)
    # Enough blocks for every SM twice, but at least 64 keys in each.
    splits = max(1, min(32, ceil_div(264, blocks), capacity // 64))
    y: tuple[tuple[int, ...], mx.Dtype] = ((batch * length, heads * d), q.dtype)
    one = {"y": y}
    parts = {
        "values": ((batch * heads * length, splits, d), mx.float32),
        "stats": ((batch * heads * length, splits, 2), mx.float32),
    }
    out = launch(
        "sdpa/sdpa_decode.cuh",
        f"qrun::SdpaDecode<T, C, D, VEC, ROWS, WARPS>{{q, k_cache, v_cache, offset, {sizes}, {splits}}}"
        f".run({'y, nullptr, nullptr' if splits == 1 else 'nullptr, values, stats'});",
        arrays,
        one if splits == 1 else parts,
        {
            "T": q.dtype,
            "C": k_cache.dtype,
            "D": d,
            "VEC": vec,
            "ROWS": rows,
            "WARPS": warps,
        },
        (splits, batch * kv_heads, ceil_div(alike, rows)),
        Shape(32 * warps, 1, warps * rows * (d + 2) * 4),
    )
    if splits == 1:
        return out[0]
    return launch(
        "sdpa/sdpa_decode.cuh",
        f"qrun::sdpa_merge<D>(values, stats, y, values_shape[1], {heads}, "
        f"values_shape[0] / {batch * heads});",
        {"values": out[0], "stats": out[1]},
        one,
        {"D": d},
        (batch * heads * length, 1, 1),
        Shape(ceil_div(d, 32) * 32),
    )[0]
