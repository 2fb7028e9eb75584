"""qmm: many rows of x times a quantized matrix, for prefill. Bound by arithmetic.

One contract with qmv, see there; only the kernels differ.
"""

from __future__ import annotations

import mlx.core as mx

from qrun.ops import _launch
from qrun.ops._launch import Norm
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.qmv import Activation, check_product, qmv_bytes, qmv_ref

qmm_ref = qmv_ref
qmm_bytes = qmv_bytes


def qmm(
    x: mx.array,
    m: QuantizedMatrix,
    *,
    norm: Norm | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    activation: Activation | None = None,
    scale: float = 1.0,
) -> mx.array:
    """x (M, K) times m (N x K), transposed -> (M, N). As qmv; meant for many rows."""
    check_product("qmm", x, m, norm, bias, residual, activation)
    return _launch.backend().qmm(
        x, m, norm=norm, bias=bias, residual=residual, activation=activation, scale=scale
    )


def qmm_flops(x: mx.array, m: QuantizedMatrix) -> int:
    """Multiplications and additions of one call."""
    return 2 * x.shape[0] * m.n * m.k
