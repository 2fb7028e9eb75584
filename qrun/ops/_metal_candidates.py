"""What may multiply on Metal: our kernels in a few geometries, fused, or MLX's own ops.

A product of a model is a `Shape`; its `key` names it in the file of timings, `candidates` are what
`_metal_tune` times. The geometry table's choice is the first of them: it multiplies where nothing
has been timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import mlx.core as mx

from qrun.ops import _metal, _mlx
from qrun.ops import _metal_geometry as geometry
from qrun.ops._metal_product import Packed

Product = Callable[..., mx.array]  # (x, m, *, norm, bias, residual, activation, scale) -> y

MLX = "mlx"  # the name of MLX's own product among the candidates


def mlx_product(
    x: mx.array,
    m: Packed,
    *,
    norm: tuple[mx.array, float] | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    activation: str | None = None,
    scale: float = 1,
) -> mx.array:
    """The same product of MLX's own ops: what ours have to beat. Rounds to x's type in between."""
    dtype = x.dtype
    if norm is not None:
        x = mx.fast.rms_norm(x, norm[0], norm[1])
    y = mx.quantized_matmul(
        x, m.w, m.scales, m.biases, True, group_size=m.group_size, bits=m.bits, mode=m.mode
    )
    if scale != 1:
        y = y * scale
    if bias is not None:
        y = y + bias
    if activation is not None:
        gate, up = y[:, 0::2], y[:, 1::2]
        y = up * (gate * _mlx.GATES[activation](gate))
    if residual is not None:
        y = y + residual
    return y.astype(dtype)


def like(rows: int) -> int:
    """The number of rows whose timings serve `rows`: beyond 32 all are alike, in whole tiles."""
    return rows if rows <= 32 else 64


@cache
def candidates(
    chip: geometry.Family, rows: int, n: int, k: int, bits: int, x_bytes: int
) -> Mapping[str, Product]:
    """What may multiply x (rows, k) with a packed matrix (n, k), by name; the default first."""
    found: dict[str, Product] = {}

    def named(kind: str, shape: geometry.Rows | geometry.Wide | geometry.Tile) -> str:
        return f"{kind}: " + " ".join(f"{axis} {size}" for axis, size in shape._asdict().items())

    def add_qmv(shape: geometry.Rows | geometry.Wide) -> None:
        kind = "fragments" if isinstance(shape, geometry.Wide) else "lanes"
        found[named(kind, shape)] = partial(_metal.qmv, shape=shape)

    def add_qmm(tile: geometry.Tile) -> None:
        if tile.threadgroup_bytes(x_bytes) <= geometry.THREADGROUP_BYTES:
            found[named("tiles", tile)] = partial(_metal.qmm, tile=tile)

    if rows <= geometry.MAX_ROWS:
        best = geometry.qmv(chip, rows, n, k, bits)
        add_qmv(best)
        if isinstance(best, geometry.Wide):
            add_qmv(best._replace(tn=4 if best.tm == 1 else 1))
        else:
            add_qmv(best._replace(rows=2 if best.rows == 4 else 4))
        more = best.split * 2
        add_qmv(best._replace(simdgroups=max(2, more), split=more))
        if best.split > 1:
            add_qmv(best._replace(simdgroups=2, split=1))
    if rows > 8:
        add_qmm(geometry.tile(chip, rows, x_bytes))
    if rows > 32:
        for rung in ("4x2", "4x4", "4x4 double"):
            add_qmm(geometry.LADDER[rung])
    if chip.matrix_units and rows > geometry.MAX_ROWS:
        return {MLX: mlx_product} | found
    return found | {MLX: mlx_product}


@dataclass(frozen=True)
class Shape:
    """One product of a model: what multiplies how many rows, and what is fused to it.

    norm, bias and scale are the model's own: they are part of a kernel's text, and a candidate that
    was compiled to be timed is the one that runs afterwards.
    """

    rows: int
    m: Packed
    dtype: mx.Dtype  # of x
    norm: tuple[mx.array, float] | None = None
    bias: mx.array | None = None
    residual: bool = False
    activation: str | None = None
    scale: float = 1

    @property
    def key(self) -> str:
        """As the file of timings names it."""
        m = self.m
        fused = (
            "norm" * (self.norm is not None),
            "bias" * (self.bias is not None),
            self.activation or "",
            "residual" * self.residual,
        )
        name = f"{like(self.rows)}x{m.n}x{m.k} {m.mode} {m.bits} bits group {m.group_size}"
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return " ".join(filter(None, (name, dtype, *fused)))

    def candidates(self) -> Mapping[str, Product]:
        """On this machine."""
        m = self.m
        return candidates(geometry.here(), like(self.rows), m.n, m.k, m.bits, self.dtype.size)
