"""Parameters, and one call into ops: what a model file is written in."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from qrun import ops
from qrun.ops import QuantizedMatrix, _launch
from qrun.ops._mlx import epilogue
from qrun.ops.qmv import Activation


@dataclass(frozen=True)
class RMSNorm:
    """weight (K,), eps. Called alone, or handed to a product to run in front of it."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        """x (M, K) -> (M, K)."""
        return ops.rms_norm(x, self.weight, self.eps)


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
        # 16-bit products of MLX's CPU backend sum in 16 bits; float32 is right and faster there.
        y = h.astype(mx.float32) @ self.weight.astype(mx.float32).T
        if scale != 1.0:
            y = y * scale
        return epilogue(y, self.bias, residual, activation).astype(x.dtype)


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
        rows = self.table[ids].astype(self.dtype)
        return rows if scale == 1.0 else rows * scale

    def as_linear(self) -> QuantizedLinear | Linear:
        """The head that shares these values."""
        if isinstance(self.table, QuantizedMatrix):
            return QuantizedLinear(self.table)
        return Linear(self.table)
