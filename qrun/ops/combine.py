"""combine: what the chosen experts made of each token, weighted and added up.

    y[m] = residual[m] + sum over j of share[m, j] * x[place[m, j]]

Summed in float32, rounded once. place and share are route's.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape


def combine(x: mx.array, place: mx.array, share: mx.array, residual: mx.array) -> mx.array:
    """x (R, N), place (M, top) int32 in 0..R-1, share (M, top) float32, residual (M, N) -> (M, N).

    Indices are data: out of range they are noticed at evaluation or not at all.
    """
    check_dtype("combine", "x", x)
    width = check_shape("combine", "x", x, "R N")["N"]
    check_dtype("combine", "place", place, mx.int32)
    sizes = check_shape("combine", "place", place, "M top")
    check_dtype("combine", "share", share, mx.float32)
    check_shape("combine", "share", share, "M top", **sizes)
    check_shape("combine", "residual", residual, "M N", M=sizes["M"], N=width)
    check_dtype("combine", "residual", residual, x.dtype)
    return _launch.backend().combine(x, place, share, residual)


def combine_ref(
    x: npt.NDArray[Any],
    place: npt.NDArray[Any],
    share: npt.NDArray[Any],
    residual: npt.NDArray[Any],
) -> npt.NDArray[np.float64]:
    """The same in float64."""
    rows = x.astype(np.float64)[place]
    return residual + (share.astype(np.float64)[..., None] * rows).sum(1)


def combine_bytes(x: mx.array, residual: mx.array) -> int:
    """Every row of x and of the residual once, and the result."""
    return x.nbytes + 2 * residual.nbytes
