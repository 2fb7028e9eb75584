"""argmax: the greedy choice, and whether the logits can be trusted."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape


def argmax(logits: mx.array) -> mx.array:
    """logits (M, V) -> int32 (M,): the first index of the largest, -1 if any is NaN or infinite."""
    check_dtype("argmax", "logits", logits)
    check_shape("argmax", "logits", logits, "M V")
    return _launch.backend().argmax(logits)


def argmax_ref(logits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The same in numpy."""
    finite = np.isfinite(logits.astype(np.float64)).all(-1)
    return np.where(finite, logits.argmax(-1), -1)


def argmax_bytes(logits: mx.array) -> int:
    """Every logit read once."""
    return logits.nbytes
