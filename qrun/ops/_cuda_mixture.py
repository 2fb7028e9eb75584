"""A mixture of experts as CUDA kernels. Shapes and meaning: route.py, gather_qmm.py, combine.py."""

from __future__ import annotations

import mlx.core as mx

from qrun.ops import _cuda_product as product
from qrun.ops import _mlx
from qrun.ops._cuda_launch import (
    Recipe,
    Shape,
    ceil_div,
    epilogue_of,
    launch,
    matrix,
    pointer,
)
from qrun.ops._cuda_qmm import arrange_grid
from qrun.ops._cuda_tiles import LONGEST, WGMMA_TILES, WgmmaTile, multiprocessors, qmv_tile
from qrun.ops.matrix import QuantizedMatrix

FEW = 64  # pairs of a token and an expert that go one by one
TILES = tuple(tile for tile in WGMMA_TILES if tile.bm <= 128)


def route(
    logits: mx.array, top: int, renormalize: bool
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """A prompt's tokens are sorted by MLX."""
    tokens, experts = logits.shape
    if tokens > 8 or top > 32 or experts > 1024:
        return _mlx.route(logits, top, renormalize)
    expert, row, place, share = launch(_route_recipe, {"logits": logits}, top, renormalize)
    return expert, row, place, share


def _route_recipe(top: int, renormalize: bool, *, logits: mx.array) -> Recipe:
    tokens, experts = logits.shape
    pairs = tokens * top
    return Recipe(
        "route/route.cuh",
        "qrun::route<TOP, EACH>(logits, expert, row, place, share, logits_shape[0], "
        f"logits_shape[1], {str(renormalize).lower()});",
        {
            "expert": ((pairs,), mx.int32),
            "row": ((pairs,), mx.int32),
            "place": ((tokens, top), mx.int32),
            "share": ((tokens, top), mx.float32),
        },
        {"TOP": top, "EACH": ceil_div(experts, 32)},
        (1, 1, 1),
        Shape(32 * tokens, 1, ceil_div(pairs, 4) * 16),  # whole 16 bytes: ptx.cuh's type
    )


def combine(x: mx.array, place: mx.array, share: mx.array, residual: mx.array) -> mx.array:
    inputs: dict[str, mx.array | None] = {"x": x, "place": place, "share": share}
    return launch(_combine_recipe, {**inputs, "residual": residual})[0]


def _combine_recipe(*, x: mx.array, place: mx.array, residual: mx.array, **_: object) -> Recipe:
    tokens, n = residual.shape
    vec = 8 if n % 8 == 0 else 1
    return Recipe(
        "combine/combine.cuh",
        "qrun::combine<TOP, VEC>(x, place, share, residual, y, x_shape[1]);",
        {"y": ((tokens, n), x.dtype)},
        {"TOP": place.shape[1], "VEC": vec},
        (ceil_div(n, 128 * vec), tokens, 1),
        Shape(128),
    )


def gather_qmm(
    x: mx.array,
    m: QuantizedMatrix,
    row: mx.array | None,
    expert: mx.array,
    *,
    count: int,
    activation: str | None,
    grouped: bool,
) -> mx.array:
    """Few pairs: a block has one of them. Many: tiles of pairs in the order of experts."""
    if product.tensor_cores(x, m) and expert.size <= FEW and m.k <= LONGEST:
        return _few(x, m, row, expert, count, activation)
    alike = x.dtype == m.scale_dtype and product.generation() == 9
    if product.tensor_cores(x, m) and alike and grouped:
        return _many(x, m, row, expert, count, activation)
    return _mlx.gather_qmm(x, m, row, expert, count=count, activation=activation, grouped=grouped)


def _few(
    x: mx.array,
    m: QuantizedMatrix,
    row: mx.array | None,
    expert: mx.array,
    count: int,
    activation: str | None,
) -> mx.array:
    inputs = {"x": x, **matrix(m), "row": row, "expert": expert}
    return launch(_few_recipe, inputs, count, m.spec.group_size, activation)[0]


def _few_recipe(
    count: int,
    group: int,
    activation: str | None,
    *,
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    row: mx.array | None,
    expert: mx.array,
    **_: object,
) -> Recipe:
    pairs, n, k = expert.size, w.shape[0] // count, x.shape[1]
    tile = qmv_tile(1, n, k, group, scales.dtype.size)
    epilogue, constants = epilogue_of(None, None, activation, 1.0, f"w_shape[0] / {count}")
    constants |= {"T": x.dtype, "S": scales.dtype, "GROUP": group}
    constants |= {**tile.arguments, "ROUNDS": tile.rounds(k)}
    blocks = max(1, ceil_div(tile.blocks * multiprocessors(), pairs))
    return Recipe(
        "qmv/qmv.cuh",
        "qrun::Qmv<T, S, GROUP, 1, TAKE, WARPS, ROUNDS, TEAMS, AHEAD, DEQUANTIZED, "
        f"SPLITS>{{x, w, scales, biases, expert_shape[0], w_shape[0] / {count}, x_shape[1], "
        f"expert, {pointer('row', row, 'int')}}}.run(static_cast<const float*>(nullptr), 0.0f, "
        f"{epilogue});",
        {"y": ((pairs, n if activation is None else n // 2), x.dtype)},
        constants,
        (min(ceil_div(n, 16), blocks), pairs, 1),
        Shape(tile.threads, tile.blocks, tile.shared(n, k, group)),
    )


def _many(
    x: mx.array,
    m: QuantizedMatrix,
    row: mx.array | None,
    expert: mx.array,
    count: int,
    activation: str | None,
) -> mx.array:
    tile = next((t for t in TILES if t.bm >= expert.size / count), TILES[-1])
    (arranged,) = launch(_arrange_recipe, {"x": x, "row": row}, tile, expert.size)
    inputs = {"arranged": arranged, **matrix(m), "expert": expert}
    return launch(_many_recipe, inputs, tile, count, m.spec.group_size, activation)[0]


def _arrange_recipe(tile: WgmmaTile, pairs: int, *, x: mx.array, row: mx.array | None) -> Recipe:
    runs, pm = ceil_div(x.shape[1], 128), ceil_div(pairs, tile.bm) * tile.bm
    return Recipe(
        "qmm/qmm_arrange.cuh",
        f"qrun::qmm_arrange(x, {pointer('row', row, 'int')}, static_cast<const float*>(nullptr), "
        f"0.0f, out, x_shape[1], {pm});",
        {"out": ((runs, 2, pm, 64), x.dtype)},
        {},
        *arrange_grid(pairs, runs),
    )


def _many_recipe(
    tile: WgmmaTile,
    count: int,
    group: int,
    activation: str | None,
    *,
    arranged: mx.array,
    w: mx.array,
    expert: mx.array,
    **_: object,
) -> Recipe:
    pairs, n, pm = expert.size, w.shape[0] // count, arranged.shape[2]
    epilogue, constants = epilogue_of(None, None, activation, 1.0, f"w_shape[0] / {count}")
    constants |= {"T": arranged.dtype, "GROUP": group, "BM": tile.bm, "WN": tile.wn}
    constants |= {"STAGES": tile.stages, "AHEAD": tile.ahead}
    return Recipe(
        "qmm/qmm_wgmma.cuh",
        "qrun::QmmWgmma<T, GROUP, BM, WN, STAGES, 1, AHEAD>{arranged, w, scales, biases, "
        f"expert_shape[0], w_shape[0] / {count}, w_shape[1] * 8, arranged_shape[2], expert, "
        f"{count}}}.run({epilogue});",
        {"y": ((pairs, n if activation is None else n // 2), arranged.dtype)},
        constants,
        ((pm // tile.bm + count) * ceil_div(n, tile.bn), 1, 1),
        Shape(128 * tile.wn, tile.blocks, tile.shared),
    )
