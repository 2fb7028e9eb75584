"""gemm: x times a dense matrix, for layers that are not quantized. The contract of qmv and qmm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape
from qrun.ops.qmv import Activation, check_activation, qmv_ref


def gemm(
    x: mx.array,
    w: mx.array,
    *,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    activation: Activation | None = None,
    scale: float = 1.0,
) -> mx.array:
    """x (M, K), w (N, K) -> (M, N) in x's dtype: activation(x @ w.T * scale + bias) + residual.

    (M, N/2) with an activation, as in qmv. Sums in float32, rounded once.
    """
    check_dtype("gemm", "x", x)
    check_dtype("gemm", "w", w)
    axes = check_shape("gemm", "x", x, "M K")
    n = check_shape("gemm", "w", w, "N K", K=axes["K"])["N"]
    out = check_activation("gemm", activation, n)
    if bias is not None:
        check_shape("gemm", "bias", bias, "N", N=n)
    if residual is not None:
        check_shape("gemm", "residual", residual, "M N", M=axes["M"], N=out)
        check_dtype("gemm", "residual", residual, x.dtype)
    return _launch.backend().gemm(
        x, w, bias=bias, residual=residual, activation=activation, scale=scale
    )


def gemm_ref(x: npt.NDArray[Any], w: npt.NDArray[Any], **behind: Any) -> npt.NDArray[np.float64]:
    """The same in float64."""
    return qmv_ref(x, w.astype(np.float64), **behind)


def gemm_bytes(x: mx.array, w: mx.array) -> int:
    """The matrix once, x once, the result once."""
    return w.nbytes + x.nbytes + x.shape[0] * w.shape[0] * x.itemsize
