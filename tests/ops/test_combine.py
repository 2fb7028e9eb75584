from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import combine
from qrun.ops.combine import combine_bytes, combine_ref
from tests.ops.matrices import DTYPES, f64, inputs, ulp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "top", "n"), [(1, 1, 1), (1, 8, 17), (5, 2, 48), (33, 3, 1000)])
def test_equals_float64_to_one_rounding(
    backend: Any, rows: int, top: int, n: int, dtype: str
) -> None:
    rng = np.random.default_rng(n)
    x, residual = inputs(rows * top, n, dtype), inputs(rows, n, dtype, seed=1)
    place = rng.permutation(rows * top).astype(np.int32).reshape(rows, top)
    share = rng.uniform(0, 1, (rows, top)).astype(np.float32)
    got = combine(x, mx.array(place), mx.array(share), residual)
    want = combine_ref(f64(x), place, share, f64(residual))
    assert got.dtype == x.dtype
    size = np.abs(want).max()
    assert np.abs(f64(got) - want).max() <= ulp(size, dtype) / 2 + 4 * ulp(size, "float32")


@pytest.mark.alone
@pytest.mark.native
def test_a_place_outside_is_an_error() -> None:
    place, share, x = mx.array([[3]], mx.int32), mx.ones((1, 1)), mx.ones((3, 16))
    with pytest.raises(RuntimeError, match="place 3 of 3 rows"):
        mx.eval(combine(x, place, share, mx.ones((1, 16))))


@pytest.mark.native
def test_nothing_is_read_behind_the_arrays() -> None:
    from qrun import _ext

    x, residual, share = mx.ones((2, 17)), mx.ones((1, 17)), mx.ones((1, 2))
    place = mx.array([[1, 0]], mx.int32)
    got = _ext.combine(*(_ext.guarded(a) for a in (x, place, share, residual)))
    assert np.array(got).tolist() == [[3.0] * 17]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": mx.zeros((4,))}, "x must have axes"),
        ({"place": mx.zeros((2, 2))}, "place has dtype float32"),
        ({"share": mx.zeros((2, 3))}, "axis top of share is 3, must be 2"),
        ({"residual": mx.zeros((2, 9))}, "axis N of residual is 9, must be 8"),
        ({"residual": mx.zeros((2, 8), mx.float16)}, "residual has dtype float16"),
    ],
)
def test_the_door(change: dict[str, Any], message: str) -> None:
    given = {
        "x": mx.zeros((4, 8)),
        "place": mx.zeros((2, 2), mx.int32),
        "share": mx.zeros((2, 2)),
        "residual": mx.zeros((2, 8)),
    }
    with pytest.raises(ValueError, match=message):
        combine(**(given | change))


def test_bytes() -> None:
    assert combine_bytes(mx.zeros((4, 8)), mx.zeros((2, 8))) == (4 + 2 * 2) * 8 * 4
