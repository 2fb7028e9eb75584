from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import softcap
from qrun.ops.softcap import softcap_bytes, softcap_ref
from tests.ops.matrices import DTYPES, f64, inputs, ulp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 17), (2, 5000)])
def test_equals_float64(backend: Any, rows: int, columns: int, dtype: str) -> None:
    x = inputs(rows, columns, dtype) * 40
    y = softcap(x, 30.0)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    # One rounding of a result below 30, and a few units of 1's last place in tanh.
    bound = ulp(30.0, dtype) / 2 + 30 * 4 * 2.0**-24
    assert np.abs(f64(y) - softcap_ref(f64(x), 30.0)).max() <= bound


def test_the_limit_is_reached_and_never_passed(backend: Any) -> None:
    x = mx.array([[1e30, -1e30, float("inf"), float("-inf"), 0.0]])
    assert np.array_equal(f64(softcap(x, 50.0)), [[50.0, -50.0, 50.0, -50.0, 0.0]])
    assert np.isnan(f64(softcap(mx.array([[float("nan")]]), 50.0))).all()


def test_broken_contract_is_named(backend: Any) -> None:
    with pytest.raises(ValueError, match=r"limit is 0\.0, must be positive"):
        softcap(mx.zeros((1, 4)), 0.0)
    assert softcap_bytes(mx.zeros((2, 8))) == 128
