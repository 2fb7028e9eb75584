"""A quantized matrix as ops take it: three arrays as in the file, or one that a backend packed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from qrun.ops import _launch
from qrun.quantization import Quantization


@dataclass(frozen=True)
class QuantizedMatrix:
    """N x K values in `spec`. As loaded: w (N, K*bits/32) uint32, scales and biases (N, K/group).

    After `pack()`, where the backend has a layout of its own, `packed` holds everything and the
    other three are None: no second copy stays in memory.
    """

    n: int
    k: int
    spec: Quantization
    w: mx.array | None
    scales: mx.array | None
    biases: mx.array | None
    packed: mx.array | None = None
    scale_dtype: mx.Dtype = mx.float16

    @staticmethod
    def of(
        w: mx.array, scales: mx.array, biases: mx.array | None, spec: Quantization
    ) -> QuantizedMatrix:
        """Check the three arrays against each other and `spec`."""
        if w.ndim != 2 or w.dtype != mx.uint32:
            raise ValueError(f"w must be uint32 with axes (N, words), but is {w.dtype} {w.shape}")
        n, k = w.shape[0], w.shape[1] * 32 // spec.bits
        if w.shape[1] * 32 % spec.bits or k % spec.group_size:
            raise ValueError(
                f"axis K of w: {w.shape[1]} words do not hold whole groups of {spec.group_size} "
                f"codes of {spec.bits} bits"
            )
        want = (n, k // spec.group_size)
        for name, array in (("scales", scales), ("biases", biases)):
            if array is not None and array.shape != want:
                raise ValueError(f"{name} has shape {array.shape}, must be {want}")
        if (spec.mode == "affine") != (biases is not None):
            raise ValueError(f"{spec.mode} takes {'' if biases is None else 'no '}biases")
        return QuantizedMatrix(n, k, spec, w, scales, biases, None, scales.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that a product must read of it."""
        arrays = (self.w, self.scales, self.biases, self.packed)
        return sum(a.nbytes for a in arrays if a is not None)

    @property
    def bits(self) -> int:
        """Bits a code."""
        return self.spec.bits

    @property
    def group_size(self) -> int:
        """Codes that share a scale."""
        return self.spec.group_size

    @property
    def mode(self) -> str:
        """affine, mxfp4, nvfp4 or mxfp8."""
        return self.spec.mode

    def pack(self, count: int = 1) -> QuantizedMatrix:
        """The same matrix in the layout of the current backend's kernels, if it has one.

        count: matrices below each other, of which an op picks some.
        """
        if self.packed is not None:
            return self
        packed = _launch.backend().pack(self, count)
        if packed is None:
            return self
        mx.async_eval(packed)
        return replace(self, w=None, scales=None, biases=None, packed=packed)

    def stacked(self, *others: QuantizedMatrix, interleave: bool = False) -> QuantizedMatrix:
        """Rows of self, then rows of others; interleaved: row 2i from self, row 2i+1 from other."""
        parts = (self, *others)
        for other in others:
            if (self.k, self.spec, self.scale_dtype) != (other.k, other.spec, other.scale_dtype):
                raise ValueError(f"cannot stack {self.spec} on {other.spec}")

        def join(arrays: list[mx.array | None]) -> mx.array | None:
            held = [a for a in arrays if a is not None]
            if len(held) < len(arrays):
                return None
            if interleave:
                return mx.stack(held, axis=1).reshape(-1, held[0].shape[1])
            return mx.concatenate(held)

        return replace(
            self,
            n=sum(m.n for m in parts),
            w=join([m.w for m in parts]),
            scales=join([m.scales for m in parts]),
            biases=join([m.biases for m in parts]),
        )

    def dense(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """All values (N, K), dequantized."""
        from qrun.ops.embedding import embedding

        return embedding(mx.arange(self.n, dtype=mx.int32), self, dtype=dtype)
