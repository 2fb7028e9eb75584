"""gather_qmm: each row of x times the matrix of the expert that its token was sent to.

    y[r] = activation(x[row[r]] @ w[expert[r]].T)

The E matrices N x K are one matrix of E*N rows, expert 0's first. Decode has a few r, so a matrix
is read for one row of x; in prefill r comes grouped by expert and each matrix is read once. Summed
in float32, rounded once.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.qmv import Activation, check_activation, gated_ref


def gather_qmm(
    x: mx.array,
    m: QuantizedMatrix,
    row: mx.array | None,
    expert: mx.array,
    *,
    count: int,
    activation: Activation | None = None,
    grouped: bool = False,
) -> mx.array:
    """x (M, K), m (E*N) x K, row (R,) int32 in 0..M-1, expert (R,) int32 in 0..E-1 -> (R, N).

    row None: pair r takes row r of x. count: E. With an activation (R, N/2), gate and up rows
    interleaved as in qmv. grouped promises that `expert` ascends. Indices are data: out of range
    they are noticed at evaluation or not at all.
    """
    check_dtype("gather_qmm", "x", x)
    rows = check_shape("gather_qmm", "x", x, "M K", K=m.k)["M"]
    if row is not None:
        rows = check_shape("gather_qmm", "row", row, "R")["R"]
        check_dtype("gather_qmm", "row", row, mx.int32)
    check_shape("gather_qmm", "expert", expert, "R", R=rows)
    check_dtype("gather_qmm", "expert", expert, mx.int32)
    if m.n % count:
        raise ValueError(f"gather_qmm: axis E*N of w is {m.n}, no multiple of {count} experts")
    check_activation("gather_qmm", activation, m.n // count)
    return _launch.backend().gather_qmm(
        x, m, row, expert, count=count, activation=activation, grouped=grouped
    )


def gather_qmm_ref(
    x: npt.NDArray[Any],
    w: npt.NDArray[np.float64],
    row: npt.NDArray[Any],
    expert: npt.NDArray[Any],
    *,
    activation: Activation | None = None,
) -> npt.NDArray[np.float64]:
    """The same in float64, on dequantized w (E, N, K)."""
    y = np.einsum("rk,rnk->rn", x.astype(np.float64)[row], w[expert])
    return y if activation is None else gated_ref(y, activation)


def gather_qmm_bytes(x: mx.array, m: QuantizedMatrix, rows: int, count: int, used: int) -> int:
    """The matrices of `used` experts once, R rows of x and of the result once."""
    return m.nbytes // count * used + rows * (m.k + m.n // count) * x.itemsize
