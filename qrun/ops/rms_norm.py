"""rms_norm: x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x (M, K), weight (K,) -> (M, K) in x's dtype; float32 inside, rounded once."""
    check_dtype("rms_norm", "x", x)
    axes = check_shape("rms_norm", "x", x, "M K")
    check_shape("rms_norm", "weight", weight, "K", K=axes["K"])
    return _launch.backend().rms_norm(x, weight, eps)


def rms_norm_ref(
    x: npt.NDArray[Any], weight: npt.NDArray[Any], eps: float
) -> npt.NDArray[np.float64]:
    """The same in float64."""
    h = x.astype(np.float64)
    return h / np.sqrt((h * h).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def rms_norm_bytes(x: mx.array, weight: mx.array) -> int:
    """x read and written once, weight read once."""
    return 2 * x.nbytes + weight.nbytes
