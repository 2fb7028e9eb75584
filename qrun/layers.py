"""Parameters, and one call into ops: what a model file is written in."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from qrun import ops
from qrun.lazy import np
from qrun.ops import QuantizedMatrix, _launch
from qrun.ops._mlx import epilogue
from qrun.ops.qmv import Activation


@dataclass(frozen=True)
class RMSNorm:
    """weight (K,), eps. Called alone, or handed to a product to run in front of it."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array, *, residual: mx.array | None = None) -> mx.array:
        """x (M, K) -> norm(x) + residual (M, K)."""
        return ops.rms_norm(x, self.weight, self.eps, residual=residual)


@dataclass(frozen=True)
class LayerNorm:
    """weight (K,), eps: (x - mean) / deviation * weight. No product takes it in front."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        """x (M, K) -> (M, K)."""
        return ops.rms_norm(x, self.weight, self.eps, centered=True)


@dataclass(frozen=True)
class QuantizedLinear:
    """N x K quantized, perhaps with a bias (N,)."""

    matrix: QuantizedMatrix
    bias: mx.array | None = None

    def __call__(
        self,
        x: mx.array,
        *,
        norm: RMSNorm | None = None,
        residual: mx.array | None = None,
        activation: Activation | None = None,
        scale: float = 1.0,
    ) -> mx.array:
        """x (M, K) -> (M, N); norm in front; scale, bias, activation, residual behind."""
        product = ops.qmv if x.shape[0] <= _launch.backend().QMV_ROWS else ops.qmm
        return product(
            x,
            self.matrix,
            norm=None if norm is None else (norm.weight, norm.eps),
            bias=self.bias,
            residual=residual,
            activation=activation,
            scale=scale,
        )


@dataclass(frozen=True)
class Linear:
    """N x K dense, for layers that are not quantized."""

    weight: mx.array
    bias: mx.array | None = None

    def __call__(
        self,
        x: mx.array,
        *,
        norm: RMSNorm | None = None,
        residual: mx.array | None = None,
        activation: Activation | None = None,
        scale: float = 1.0,
    ) -> mx.array:
        """As QuantizedLinear."""
        h = x if norm is None else norm(x)
        return ops.gemm(
            h,
            self.weight,
            bias=self.bias,
            residual=residual,
            activation=activation,
            scale=scale,
        )


@dataclass(frozen=True)
class Stacked:
    """Several linears over the same x whose formats differ, so that they cannot be one matrix."""

    parts: tuple[QuantizedLinear | Linear, ...]
    interleave: bool = False

    def __call__(
        self,
        x: mx.array,
        *,
        norm: RMSNorm | None = None,
        residual: mx.array | None = None,
        activation: Activation | None = None,
        scale: float = 1.0,
    ) -> mx.array:
        """As QuantizedLinear over the stacked rows."""
        h = x if norm is None else norm(x)
        ys = [part(h, scale=scale) for part in self.parts]
        y = mx.concatenate(ys, axis=1)
        if self.interleave:
            y = mx.stack(ys, axis=2).reshape(x.shape[0], -1)
        return epilogue(y.astype(mx.float32), None, residual, activation).astype(x.dtype)


@dataclass(frozen=True)
class Experts:
    """E quantized linears N x K in one matrix, expert 0's rows first."""

    matrix: QuantizedMatrix
    count: int

    def __call__(
        self,
        x: mx.array,
        row: mx.array | None,
        expert: mx.array,
        *,
        activation: Activation | None = None,
        grouped: bool = False,
    ) -> mx.array:
        """x (M, K); result r is row[r] of x times expert[r], see ops.gather_qmm -> (R, N)."""
        return ops.gather_qmm(
            x, self.matrix, row, expert, count=self.count, activation=activation, grouped=grouped
        )


@dataclass(frozen=True)
class DenseExperts:
    """The same, (E, N, K) and not quantized."""

    weight: mx.array

    def __call__(
        self,
        x: mx.array,
        row: mx.array | None,
        expert: mx.array,
        *,
        activation: Activation | None = None,
        grouped: bool = False,
    ) -> mx.array:
        """As Experts."""
        y = mx.gather_mm(
            x.astype(mx.float32)[:, None],
            self.weight.astype(mx.float32).swapaxes(1, 2),
            lhs_indices=mx.arange(x.shape[0]) if row is None else row,
            rhs_indices=expert,
            sorted_indices=grouped,
        )
        return epilogue(y[:, 0], None, None, activation).astype(x.dtype)


AnyLinear = QuantizedLinear | Linear | Stacked


@dataclass(frozen=True)
class Embedding:
    """V x K, quantized or dense; also the output head where the model ties the two."""

    table: QuantizedMatrix | mx.array
    dtype: mx.Dtype = field(default=mx.float32)

    def __call__(self, ids: mx.array, *, scale: float = 1.0) -> mx.array:
        """ids (L,) -> (L, K)."""
        if isinstance(self.table, QuantizedMatrix):
            return ops.embedding(ids, self.table, dtype=self.dtype, scale=scale)
        rows = self.table[ids]
        return (rows if scale == 1.0 else rows.astype(mx.float32) * scale).astype(self.dtype)

    def as_linear(self) -> QuantizedLinear | Linear:
        """The head that shares these values."""
        if isinstance(self.table, QuantizedMatrix):
            return QuantizedLinear(self.table)
        return Linear(self.table)


def softcap(x: mx.array, limit: float) -> mx.array:
    """limit * tanh(x / limit): values stay below the limit. 0: x as it is."""
    if not limit:
        return x
    return ops.softcap(x, limit)


def round_to_bfloat16(value: float) -> float:
    """The nearest bfloat16: a constant as a model trained in that type had it."""
    word = np.array(value, np.float32).view(np.uint32)
    rounded = word + 0x7FFF + (word >> 16 & 1) & np.uint32(0xFFFF0000)
    return float(rounded.view(np.float32))
