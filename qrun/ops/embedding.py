"""embedding: rows of a quantized matrix by index, dequantized."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape
from qrun.ops.matrix import QuantizedMatrix


def embedding(
    ids: mx.array, m: QuantizedMatrix, *, dtype: mx.Dtype = mx.float32, scale: float = 1.0
) -> mx.array:
    """ids (L,) int32 in 0..N-1, m N x K -> (L, K) in dtype, times scale.

    The values are computed in float32 and rounded once. An id outside the matrix is not read:
    its row is undefined. (Checking would cost a wait for the device.)
    """
    check_dtype("embedding", "ids", ids, mx.int32, mx.uint32)
    check_shape("embedding", "ids", ids, "L")
    return _launch.backend().embedding(ids, m, dtype=dtype, scale=scale)


def embedding_ref(
    ids: npt.NDArray[Any], w: npt.NDArray[np.float64], scale: float = 1.0
) -> npt.NDArray[np.float64]:
    """The same in float64, on dequantized w (N, K)."""
    return w[ids] * scale


def embedding_bytes(ids: mx.array, m: QuantizedMatrix, itemsize: int = 4) -> int:
    """Packed rows read, dequantized rows written."""
    return ids.size * (m.nbytes // m.n + m.k * itemsize)
