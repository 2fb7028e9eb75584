from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import Routes, route
from qrun.ops.route import route_bytes, route_ref
from tests.ops.matrices import DTYPES, f64

SHAPES = [(1, 4, 2), (1, 128, 8), (3, 5, 5), (7, 6, 1), (40, 64, 6), (300, 128, 8)]


def by_token(routes: Routes) -> tuple[np.ndarray, np.ndarray]:
    """chosen (M, top) and shares (M, top), each token's sorted by expert."""
    place, share = np.array(routes.place), np.array(routes.share)
    chosen = np.array(routes.expert)[place]
    order = chosen.argsort(-1)
    return np.take_along_axis(chosen, order, -1), np.take_along_axis(share, order, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("rows", "experts", "top"), SHAPES)
def test_equals_float64(
    backend: Any, rows: int, experts: int, top: int, renormalize: bool, dtype: str
) -> None:
    # Distinct in every type: neighbours of 128 numbers in -4 .. 4 differ by a 16th.
    rng = np.random.default_rng(experts)
    order = np.stack([rng.permutation(experts) for _ in range(rows)])
    logits = mx.array((order / 16 - 4).astype(np.float32)).astype(DTYPES[dtype])
    routes = route(logits, top, renormalize=renormalize)
    chosen, share = by_token(routes)
    want, want_share = route_ref(f64(logits), top, renormalize=renormalize)
    by_expert = want.argsort(-1)
    np.testing.assert_array_equal(chosen, np.take_along_axis(want, by_expert, -1))
    np.testing.assert_allclose(share, np.take_along_axis(want_share, by_expert, -1), rtol=2e-6)


@pytest.mark.parametrize(("rows", "experts", "top"), SHAPES)
def test_pairs_are_listed_once_and_experts_together(
    backend: Any, rows: int, experts: int, top: int
) -> None:
    logits = mx.array(np.random.default_rng(1).normal(size=(rows, experts)).astype(np.float32))
    routes = route(logits, top, renormalize=True)
    expert, row, place = (np.array(a) for a in routes[:3])
    assert expert.shape == row.shape == (rows * top,)
    assert sorted(place.reshape(-1)) == list(range(rows * top))
    np.testing.assert_array_equal(row[place], np.repeat(np.arange(rows)[:, None], top, 1))
    assert (np.diff(expert) != 0).sum() == len(set(expert)) - 1
    if rows > 1:
        assert (np.diff(expert) >= 0).all()


def test_what_is_not_finite_shows(backend: Any) -> None:
    """Experts stay in range, and a share is NaN, so that the logits of the model become NaN."""
    logits = np.zeros((3, 8), np.float32)
    logits[1, 5] = np.nan
    logits[2] = np.nan
    for renormalize in (True, False):
        routes = route(mx.array(logits), 2, renormalize=renormalize)
        chosen, share = by_token(routes)
        assert ((chosen >= 0) & (chosen < 8)).all()
        assert np.isfinite(share[0]).all()
        assert np.isnan(share[1:]).any(-1).all()


def test_large_logits_of_either_sign(backend: Any) -> None:
    routes = route(mx.array([[1e30, -1e30, 1e4, -1e4]]), 2, renormalize=False)
    chosen, share = by_token(routes)
    assert chosen.tolist() == [[0, 2]]
    assert share.tolist() == [[1, 0]]


@pytest.mark.parametrize("top", [0, 5])
def test_the_door(top: int) -> None:
    with pytest.raises(ValueError, match=f"top is {top}, must be 1 to 4"):
        route(mx.zeros((2, 4)), top, renormalize=True)


def test_bytes() -> None:
    assert route_bytes(mx.zeros((2, 64)), 4) == 2 * 64 * 4 + 2 * 4 * 16
