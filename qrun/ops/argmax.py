"""argmax: the greedy choice, and whether the logits can be trusted."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape


def argmax(logits: mx.array, limit: int | None = None) -> mx.array:
    """logits (M, V) -> int32 (M,): the first index of the largest, -1 if any is NaN or infinite.

    limit: only the first so many columns count (a tokenizer may know fewer ids than V).
    """
    check_dtype("argmax", "logits", logits)
    v = check_shape("argmax", "logits", logits, "M V")["V"]
    if limit is not None and not 1 <= limit <= v:
        raise ValueError(f"argmax: limit is {limit}, must lie in 1 .. {v}")
    return _launch.backend().argmax(logits, v if limit is None else limit)


def argmax_ref(logits: npt.NDArray[Any], limit: int | None = None) -> npt.NDArray[np.int64]:
    """The same in numpy."""
    logits = logits[:, :limit]
    finite = np.isfinite(logits.astype(np.float64)).all(-1)
    return np.where(finite, logits.argmax(-1), -1)


def argmax_bytes(logits: mx.array) -> int:
    """Every logit read once."""
    return logits.nbytes
