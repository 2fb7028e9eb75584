"""Products with a matrix as Metal calls: qmv and qmm on packed weights, gemm on plain ones."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Protocol

import mlx.core as mx

from qrun.ops import _metal_geometry as geometry
from qrun.ops._metal_call import Call, Value, call, ceil_div, literal

# Those of common/epilogue.metal, and whether they make one column of two, a gate and its up.
ACTIVATIONS = {None: False, "swiglu": True, "geglu": True}


def constant(activation: str | None) -> str:
    """Its name in common/epilogue.metal."""
    return (activation or "none").upper()


class Packed(Protocol):
    """What the kernels need of a QuantizedMatrix."""

    @property
    def w(self) -> mx.array: ...  # uint32 (N, K * bits / 32)
    @property
    def scales(self) -> mx.array: ...  # (N, K / group_size)
    @property
    def biases(self) -> mx.array | None: ...  # as scales; None for mxfp4, nvfp4, mxfp8
    @property
    def bits(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...


@dataclass(frozen=True)
class Behind:
    """What follows a product: y = activation(y * scale + bias) + residual.

    A field is a term, the member of that name of `Epilogue`; the default means that there is none.
    """

    scale: float = 1
    bias: mx.array | None = None  # (N,)
    activation: str | None = None
    residual: mx.array | None = None  # as y

    def terms(self) -> dict[str, mx.array | float]:
        """Those there are, the activation aside."""
        held = [(f, getattr(self, f.name)) for f in fields(self) if f.name != "activation"]
        return {f.name: v for f, v in held if isinstance(v, mx.array) or v != f.default}

    def inputs(self) -> dict[str, mx.array]:
        return {name: term for name, term in self.terms().items() if isinstance(term, mx.array)}

    def columns(self, n: int) -> int:
        return n // 2 if ACTIVATIONS[self.activation] else n

    def filled(self, n: int, more: int) -> Behind:
        """For sums of `more` columns in place of n: zeros behind each term's own."""
        wider = {n: more, self.columns(n): self.columns(more)}
        return replace(
            self,
            **{
                name: mx.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, wider[a.shape[-1]] - a.shape[-1])])
                for name, a in self.inputs().items()
            },
        )

    def text(self, n: str) -> str:
        """`behind`, the epilogue for sums of n columns."""
        terms = self.terms()
        has = " | ".join(name.upper() for name in terms) or "0"
        lines = [f"Epilogue<T, B, {constant(self.activation)}, {has}> behind{{y, {n}}};"]
        for name, term in terms.items():
            value = name if isinstance(term, mx.array) else literal(term)
            lines.append(f"behind.{name} = {value};")
        return "\n".join(lines)

    def template(self, dtype: mx.Dtype) -> dict[str, Value]:
        return {"B": dtype if self.bias is None else self.bias.dtype}


def matrix_inputs(m: Packed) -> dict[str, mx.array]:
    return {"w": m.w, "scales": m.scales} | ({} if m.biases is None else {"biases": m.biases})


def scheme(m: Packed) -> str:
    """The type that knows what a word of w means."""
    return "Affine<S, BITS, GROUP>" if m.biases is not None else "Micro<FORMAT>"


def packed(m: Packed, k: str) -> str:
    """The matrix itself, with k weights in a row."""
    return f"Scheme{{w, scales, {'' if m.biases is None else 'biases, '}{k}}}"


def scheme_template(m: Packed) -> dict[str, Value]:
    if m.biases is None:
        return {"FORMAT": {"mxfp4": 0, "nvfp4": 1, "mxfp8": 2}[m.mode]}
    return {"S": m.scales.dtype, "BITS": m.bits, "GROUP": m.group_size}


def access(dtype: mx.Dtype, columns: int) -> int:
    """Elements that move at a time, 16 bytes at most: every row has to start on an access."""
    elements = 16 // dtype.size
    while columns % elements:
        elements //= 2
    return elements


def qmv_call(
    x: mx.array,
    m: Packed,
    behind: Behind,
    norm: tuple[mx.array, float] | None = None,
    shape: geometry.Rows | geometry.Wide | None = None,
) -> Call:
    """x (M, K), M <= geometry.MAX_ROWS, N >= 8."""
    count = x.shape[0]
    shape = shape or geometry.qmv(geometry.here(), count, m.n, m.k, m.bits)
    wide = isinstance(shape, geometry.Wide)
    if wide:
        kernel, rows, at_a_time = "QmvWide<T, Scheme, TM, TN,", "x_shape[0], ", 8 * shape.tn
    else:
        kernel, rows, at_a_time = "Qmv<T, Scheme, M, ROWS,", "", shape.rows
    source = f"""
using Scheme = {scheme(m)};
using Kernel = {kernel} RUN, SIMDGROUPS, SPLIT, NORM>;
{behind.text("w_shape[0]")}
threadgroup float shared[Kernel::SHARED];
Kernel::template run<G>(x, {"norm" if norm else "nullptr"}, {literal(norm[1] if norm else 0)},
    {packed(m, "x_shape[1]")}, behind, {rows}w_shape[0], x_shape[1], shared,
    threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
    inputs = {"x": x} | matrix_inputs(m) | ({} if norm is None else {"norm": norm[0]})
    template: dict[str, Value] = {"T": x.dtype, **scheme_template(m)}
    template |= {} if wide else {"M": count}
    template |= {name.upper(): value for name, value in shape._asdict().items()}
    template |= {"NORM": norm is not None, "G": x.dtype if norm is None else norm[0].dtype}
    groups = ceil_div(m.n, at_a_time * (shape.simdgroups // shape.split))
    return call(
        "qmv_wide" if wide else "qmv",
        "qmv/qmv_wide.metal" if wide else "qmv/qmv.metal",
        source,
        inputs | behind.inputs(),
        {"y": ((count, behind.columns(m.n)), x.dtype)},
        template | behind.template(x.dtype),
        (groups * 32 * shape.simdgroups, 1, 1),
        32 * shape.simdgroups,
    )


def qmm_call(
    x: mx.array,
    m: Packed,
    behind: Behind,
    tile: geometry.Tile | None = None,
    by_rows: bool = True,
) -> Call:
    """x (M, K), N >= 8. by_rows False: the packed matrix is (K, N), the product x @ w."""
    count, n = x.shape[0], m.n if by_rows else m.k
    tile = tile or geometry.tile(geometry.here(), count, x.dtype.size)
    source = f"""
const int N = {"w_shape[0]" if by_rows else "scales_shape[1] * GROUP"};
using Scheme = {scheme(m)};
using Kernel = Qmm<T, Scheme, BM, BN, BK, WM, WN, STAGES, VEC, BY_ROWS>;
{behind.text("N")}
threadgroup uint4 tiles[Kernel::TILES];
Kernel::run(x, {packed(m, "x_shape[1]" if by_rows else "N")}, behind, x_shape[0], N, x_shape[1],
    tiles, threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);
"""
    template: dict[str, Value] = {"T": x.dtype, **scheme_template(m)}
    template |= dict(zip(("BM", "BN", "BK", "WM", "WN", "STAGES"), tile, strict=True))
    return call(
        "qmm",
        "qmm/qmm.metal",
        source,
        {"x": x} | matrix_inputs(m) | behind.inputs(),
        {"y": ((count, behind.columns(n)), x.dtype)},
        template
        | {"VEC": access(x.dtype, x.shape[1]), "BY_ROWS": by_rows}
        | behind.template(x.dtype),
        (ceil_div(count, tile.bm) * tile.threads, ceil_div(n, tile.bn), 1),
        tile.threads,
    )


def gemm_call(
    x: mx.array,
    w: mx.array,
    behind: Behind,
    tile: geometry.Tile | None = None,
    by_rows: bool = True,
) -> Call:
    """x (M, K), w (N, K) of any float type; by_rows False: w (K, N). At least 8 elements each."""
    (count, k), n = x.shape, w.shape[0 if by_rows else 1]
    tile = tile or geometry.tile(geometry.here(), count, x.dtype.size)
    source = f"""
const int N = w_shape[{0 if by_rows else 1}];
using Kernel = Gemm<T, V, BM, BN, BK, WM, WN, STAGES, VEC, VEC_W, BY_ROWS>;
{behind.text("N")}
threadgroup uint4 tiles[Kernel::TILES];
Kernel::run(x, w, behind, x_shape[0], N, x_shape[1], tiles,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
    template: dict[str, Value] = {"T": x.dtype, "V": w.dtype, "BY_ROWS": by_rows}
    template |= {"VEC": access(x.dtype, k), "VEC_W": access(w.dtype, w.shape[1])}
    template |= dict(zip(("BM", "BN", "BK", "WM", "WN", "STAGES"), tile, strict=True))
    return call(
        "gemm",
        "gemm/gemm.metal",
        source,
        {"x": x, "w": w} | behind.inputs(),
        {"y": ((count, behind.columns(n)), x.dtype)},
        template | behind.template(x.dtype),
        (ceil_div(count, tile.bm) * tile.threads, ceil_div(n, tile.bn), 1),
        tile.threads,
    )
