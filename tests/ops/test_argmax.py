from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import argmax
from qrun.ops.argmax import argmax_bytes, argmax_ref
from tests.ops.matrices import DTYPES, f64, inputs

WIDTHS = (1, 2, 7, 8, 15, 16, 17, 33, 352, 49152)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("rows", [1, 3])
def test_equals_numpy(backend: Any, rows: int, n: int, dtype: str) -> None:
    """16-bit rows of this width are full of ties: the first counts."""
    logits = inputs(rows, n, dtype)
    got = argmax(logits)
    assert got.dtype == mx.int32
    assert np.array_equal(np.array(got), argmax_ref(f64(logits)))


@pytest.mark.parametrize("n", WIDTHS)
def test_every_place_can_win(backend: Any, n: int) -> None:
    places = sorted({0, 1, n // 2, n - 2, n - 1} & set(range(n)))
    rows = np.full((len(places), n), -3.0, np.float32)
    for row, place in zip(rows, places, strict=True):
        row[place] = -2.0
    assert np.array(argmax(mx.array(rows))).tolist() == places


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", WIDTHS)
def test_case_05_one_bad_logit_anywhere_gives_minus_one(
    backend: Any, n: int, bad: float, dtype: str
) -> None:
    for place in sorted({0, n // 2, n - 1}):
        rows = np.zeros((2, n), np.float32)
        rows[0, place] = bad
        got = argmax(mx.array(rows).astype(DTYPES[dtype]))
        assert np.array(got).tolist() == [-1, 0]


@pytest.mark.parametrize("limit", [1, 16, 17, 351])
def test_columns_behind_the_limit_do_not_count(backend: Any, limit: int) -> None:
    rows = np.arange(2 * 352, dtype=np.float32).reshape(2, 352)
    rows[1, limit] = np.nan
    assert np.array(argmax(mx.array(rows), limit)).tolist() == [limit - 1] * 2
    assert argmax_ref(rows, limit).tolist() == [limit - 1] * 2


def test_the_largest_finite_value_is_finite(backend: Any) -> None:
    logits = mx.full((1, 64), 65504.0, mx.float16)
    assert argmax(logits).item() == 0


@pytest.mark.parametrize(
    ("logits", "message"),
    [(mx.zeros((4,)), r"axes \(M, V\)"), (mx.zeros((1, 4), mx.int32), "logits has dtype int32")],
)
def test_broken_contract_is_named(logits: mx.array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        argmax(logits)


def test_bytes() -> None:
    assert argmax_bytes(mx.zeros((1, 64))) == 256
