"""qmv: few rows of x times a quantized matrix, for decode. Bound by memory.

    y = rms_norm(x) @ w.T * scale + bias;  y = activation(y);  y = y + residual

x (M, K), m an N x K matrix, result (M, N) in x's dtype; (M, N/2) with an activation, whose gate and
up rows are interleaved: out[i] = act(y[2i]) * y[2i+1]. Dequantization and sums in float32, rounded
once. Any M, N >= 1, any K divisible by the group size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._launch import Norm
from qrun.ops._shapes import check_dtype, check_shape
from qrun.ops.matrix import QuantizedMatrix

Activation = Literal["swiglu", "geglu"]


def qmv(
    x: mx.array,
    m: QuantizedMatrix,
    *,
    norm: Norm | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    activation: Activation | None = None,
    scale: float = 1.0,
) -> mx.array:
    """The product for few rows. Arguments and result as in this file's header.

    norm: (weight (K,), eps); bias (N,); residual (M, N) or (M, N/2) behind an activation.
    Raises ValueError where a shape or dtype breaks the contract.
    """
    check_product("qmv", x, m, norm, bias, residual, activation)
    return _launch.backend().qmv(
        x, m, norm=norm, bias=bias, residual=residual, activation=activation, scale=scale
    )


def check_product(
    op: str,
    x: mx.array,
    m: QuantizedMatrix,
    norm: Norm | None,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: Activation | None,
) -> None:
    """The door of qmv and qmm: they share one contract."""
    check_dtype(op, "x", x)
    rows = check_shape(op, "x", x, "M K", K=m.k)["M"]
    if not rows:
        raise ValueError(f"{op}: axis M of x is 0, must be at least 1")
    out = check_activation(op, activation, m.n)
    if norm is not None:
        check_shape(op, "norm", norm[0], "K", K=m.k)
    if bias is not None:
        check_shape(op, "bias", bias, "N", N=m.n)
    if residual is not None:
        check_shape(op, "residual", residual, "M N", M=rows, N=out)
        check_dtype(op, "residual", residual, x.dtype)


def check_activation(op: str, activation: Activation | None, n: int) -> int:
    """Of a product with n rows of w -> columns of its result."""
    if activation is None:
        return n
    if activation not in get_args(Activation):
        names = " or ".join(get_args(Activation))
        raise ValueError(f"{op}: activation is {activation}, must be {names}")
    if n % 2:
        raise ValueError(f"{op}: axis N of w is {n}, must be even for {activation}")
    return n // 2


def qmv_ref(
    x: npt.NDArray[Any],
    w: npt.NDArray[np.float64],
    *,
    norm: tuple[npt.NDArray[Any], float] | None = None,
    bias: npt.NDArray[Any] | None = None,
    residual: npt.NDArray[Any] | None = None,
    activation: Activation | None = None,
    scale: float = 1.0,
) -> npt.NDArray[np.float64]:
    """The same in float64, on dequantized w (N, K)."""
    h = x.astype(np.float64)
    if norm is not None:
        h = h / np.sqrt((h * h).mean(-1, keepdims=True) + norm[1]) * norm[0].astype(np.float64)
    y = h @ w.T * scale
    if bias is not None:
        y = y + bias.astype(np.float64)
    if activation is not None:
        y = gated_ref(y, activation)
    if residual is not None:
        y = y + residual.astype(np.float64)
    return y


def gated_ref(y: npt.NDArray[np.float64], activation: Activation) -> npt.NDArray[np.float64]:
    """act(gate) * up of interleaved columns (M, 2N) -> (M, N), in float64."""
    gate, up = y[..., 0::2], y[..., 1::2]
    return _CURVES[activation](gate) * up


def _silu(gate: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return gate / (1 + np.exp(-gate))


def _gelu(gate: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The tanh approximation (Hendrycks and Gimpel, 2016), as gemma uses it."""
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))


_CURVES: dict[Activation, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]] = {
    "swiglu": _silu,
    "geglu": _gelu,
}


def qmv_bytes(x: mx.array, m: QuantizedMatrix) -> int:
    """The fewest bytes a call must move: the matrix once, x once, the result once."""
    return m.nbytes + x.nbytes + x.shape[0] * m.n * x.itemsize
