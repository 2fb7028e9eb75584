"""Everything that could multiply, side by side on the chip at hand: what the geometry table claims.

Many rows: every rung of the register-blocking ladder. Few rows: every form of qmv, for each number
of rows that decoding and speculation use. All against MLX's own product, on matrices that no cache
holds, checked against it too. Whoever has a Mac can so confirm the table, or correct it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from qrun.ops import _metal
from qrun.ops import _metal_geometry as geometry
from qrun.ops._metal_candidates import MLX, Product, Shape
from qrun.ops._metal_product import Packed
from qrun.ops._metal_tune import BATCH_MANY, FEW_ROWS, jobs, measure

FEW, MANY = (1, 2, 4, 8, 16), (512,)  # rows of x


@dataclass(frozen=True)
class Rung:
    """One product, one way, timed."""

    what: str  # which product
    way: str  # which kernel
    m: int
    n: int
    k: int
    seconds: float  # of one call, the best of a few
    mlx: float  # MLX's own, met in the same rounds


def ladder(
    matrices: Sequence[Packed],
    dtype: mx.Dtype,
    rows: Sequence[int] = FEW + MANY,
    *,
    clock: Callable[[], float] = time.perf_counter,
    evaluate: Callable[..., None] = mx.eval,  # pyright: ignore[reportUnknownMemberType]
    traced: Callable[[Any], Any] = mx.compile,
    show: Callable[[str], None] = lambda line: None,
) -> list[Rung]:
    """Every way to multiply so many rows of dtype with one of the matrices, which are alike."""
    found: list[Rung] = []
    for m in rows:
        count = len(matrices) if m <= FEW_ROWS else BATCH_MANY
        shapes = [Shape(m, matrix, dtype) for matrix in matrices[:count]]
        n, k = matrices[0].n, matrices[0].k
        what = f"{n}x{k} M={m} {str(dtype).removeprefix('mlx.core.')}"
        show(what)
        met = jobs(shapes, ways(shapes[0]), traced, count)
        expected = met[MLX].once()
        evaluate(expected)
        forever = float("inf")
        seconds = measure(met, expected, forever, forever, clock, evaluate)
        own = seconds[MLX]
        for way, taken in seconds.items():
            if taken is not None and own is not None:
                found.append(Rung(what, way, m, n, k, taken / count, own / count))
    return found


def ways(shape: Shape) -> dict[str, Product]:
    """Every product of ours for a shape, the table's choice marked, and MLX's own."""
    found = dict(shape.candidates())
    chosen = next(name for name in found if name != MLX)
    if shape.rows > geometry.MAX_ROWS:
        size = shape.dtype.size
        table = geometry.tile(geometry.here(), shape.rows, size)
        found = {
            name: partial(_metal.qmm, tile=tile)
            for name, tile in geometry.LADDER.items()
            if tile.threadgroup_bytes(size) <= geometry.THREADGROUP_BYTES
        }
        chosen = next(name for name in found if geometry.LADDER[name] == table)
    named = {f"{name} (table)" if name == chosen else name: p for name, p in found.items()}
    return named | {MLX: shape.candidates()[MLX]}
