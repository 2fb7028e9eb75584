"""Checks at an op's door: each names the op, the tensor, the axis and both numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def check_shape(op: str, name: str, array: mx.array, axes: str, **sizes: int) -> dict[str, int]:
    """Match array's shape against named axes, for instance "M K" with K=576.

    Names given in `sizes` must agree; the others are bound and returned with them.
    """
    names, shape = _names(axes), array.shape
    if len(shape) != len(names):
        raise ValueError(
            f"{op}: {name} must have axes ({', '.join(names)}), but its shape is {shape}"
        )
    for axis, size in zip(names, shape, strict=False):
        want = sizes.setdefault(axis, size)
        if size != want:
            raise ValueError(f"{op}: axis {axis} of {name} is {size}, must be {want}")
    return sizes


@cache
def _names(axes: str) -> list[str]:
    return axes.split()


def check_dtype(op: str, name: str, array: mx.array, *allowed: Any) -> None:
    """Raise unless array's dtype is one of `allowed` (default: the three float types)."""
    allowed = allowed or FLOATS
    if array.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("mlx.core.") for d in allowed)
        dtype = str(array.dtype).removeprefix("mlx.core.")
        raise ValueError(f"{op}: {name} has dtype {dtype}, must be one of {names}")
