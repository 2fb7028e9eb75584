"""route: a router's logits -> which experts take each token, and their shares.

    chosen[m] = the `top` largest of logits[m];  share[m] = softmax of those, or of all E

The R = M*top pairs of a token and an expert (Shazeer et al., 2017) lie in the order of experts, of
one token in any order: an expert's rows follow each other, and gather_qmm reads its matrix once. A
NaN counts as the largest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape


class Routes(NamedTuple):
    """Pair r sends token row[r] to expert[r]; token m's choice j is pair place[m, j]."""

    expert: mx.array  # (R,) int32, equal ones together
    row: mx.array  # (R,) int32
    place: mx.array  # (M, top) int32
    share: mx.array  # (M, top) float32


def route(logits: mx.array, top: int, *, renormalize: bool) -> Routes:
    """logits (M, E). renormalize: a token's shares add up to 1."""
    check_dtype("route", "logits", logits)
    experts = check_shape("route", "logits", logits, "M E")["E"]
    if not 1 <= top <= experts:
        raise ValueError(f"route: top is {top}, must be 1 to {experts}, the axis E of logits")
    return Routes(*_launch.backend().route(logits, top, renormalize))


def route_ref(
    logits: npt.NDArray[Any], top: int, *, renormalize: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """chosen (M, top), the largest first, and their shares, in float64."""
    x = logits.astype(np.float64)
    chosen = np.argsort(-x, axis=-1, kind="stable")[:, :top]
    p = np.exp(x - x.max(-1, keepdims=True))
    share = np.take_along_axis(p / p.sum(-1, keepdims=True), chosen, -1)
    return chosen, share / share.sum(-1, keepdims=True) if renormalize else share


def route_bytes(logits: mx.array, top: int) -> int:
    """Every logit read once; four numbers a pair written."""
    return logits.nbytes + logits.shape[0] * top * 16
