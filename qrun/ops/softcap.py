"""softcap: limit * tanh(x / limit), so that values stay below the limit (Gemma Team, 2024)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape


def softcap(x: mx.array, limit: float) -> mx.array:
    """x (M, N), limit > 0 -> (M, N) in x's dtype; float32 inside, rounded once."""
    check_dtype("softcap", "x", x)
    check_shape("softcap", "x", x, "M N")
    if not limit > 0:
        raise ValueError(f"softcap: limit is {limit}, must be positive")
    return _launch.backend().softcap(x, limit)


def softcap_ref(x: npt.NDArray[Any], limit: float) -> npt.NDArray[np.float64]:
    """The same in float64."""
    return np.tanh(x.astype(np.float64) / limit) * limit


def softcap_bytes(x: mx.array) -> int:
    """Each number read and written once."""
    return 2 * x.nbytes
