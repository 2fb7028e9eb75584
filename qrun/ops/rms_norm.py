"""rms_norm: x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape


def rms_norm(
    x: mx.array,
    weight: mx.array,
    eps: float,
    *,
    residual: mx.array | None = None,
    centered: bool = False,
) -> mx.array:
    """x (M, K), weight (K,) -> (M, K) in x's dtype; float32 inside, rounded once.

    residual (M, K): added behind, where a backend does not fuse it with one rounding more.
    centered: the norm of x - mean(x), which is a layer norm (Ba et al., 2016).
    """
    check_dtype("rms_norm", "x", x)
    axes = check_shape("rms_norm", "x", x, "M K")
    check_shape("rms_norm", "weight", weight, "K", K=axes["K"])
    if residual is not None:
        check_shape("rms_norm", "residual", residual, "M K", M=axes["M"], K=axes["K"])
        check_dtype("rms_norm", "residual", residual, x.dtype)
    return _launch.backend().rms_norm(x, weight, eps, residual, centered)


def rms_norm_parts(x: mx.array, weights: Sequence[mx.array], eps: float) -> mx.array:
    """x (M, K): its first columns normed by themselves with weights[0], the next with weights[1],
    and so on; what is left of K stays as it is -> (M, K).
    """
    check_dtype("rms_norm", "x", x)
    k = check_shape("rms_norm", "x", x, "M K")["K"]
    ends = list(accumulate(w.size for w in weights))
    if ends[-1] > k:
        raise ValueError(f"rms_norm: axis K of x is {k}, weights are for {ends[-1]} columns")
    own = _launch.backend().rms_norm_parts
    if own is not None:
        return own(x, weights, eps)
    *parts, rest = mx.split(x, ends, axis=1)
    normed = [rms_norm(part, w, eps) for part, w in zip(parts, weights, strict=True)]
    return mx.concatenate([*normed, rest], axis=1)


def rms_norm_ref(
    x: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    eps: float,
    residual: npt.NDArray[Any] | None = None,
    centered: bool = False,
) -> npt.NDArray[np.float64]:
    """The same in float64."""
    h = x.astype(np.float64)
    h = h - h.mean(-1, keepdims=True) if centered else h
    y = h / np.sqrt((h * h).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)
    return y if residual is None else y + residual.astype(np.float64)


def rms_norm_bytes(x: mx.array, weight: mx.array) -> int:
    """x read and written once, weight read once."""
    return 2 * x.nbytes + weight.nbytes
