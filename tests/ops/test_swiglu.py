from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import swiglu
from qrun.ops.swiglu import swiglu_bytes, swiglu_ref
from tests.ops.matrices import DTYPES, f64, inputs, ulp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (3, 14), (5, 66), (33, 3072)])
def test_equals_float64_to_one_rounding(backend: Any, rows: int, columns: int, dtype: str) -> None:
    x = inputs(rows, columns, dtype) * 4
    y = swiglu(x)
    want = swiglu_ref(f64(x))
    assert y.dtype == x.dtype
    assert y.shape == (rows, columns // 2)
    size = np.abs(want).max()
    assert np.abs(f64(y) - want).max() <= ulp(size, dtype) / 2 + 4 * ulp(size, "float32")


def test_gate_is_the_even_column(backend: Any) -> None:
    y = f64(swiglu(mx.array([[0.0, 5.0, 100.0, 3.0]])))
    assert np.array_equal(y, [[0.0, 300.0]])


def test_large_gates_of_either_sign(backend: Any) -> None:
    y = f64(swiglu(mx.array([[1e4, 1.0, -1e4, 1.0]])))
    assert y[0, 0] == 1e4
    assert abs(y[0, 1]) < 1e-30


def test_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="is 3, must be even"):
        swiglu(mx.zeros((1, 3)))


def test_bytes() -> None:
    assert swiglu_bytes(mx.zeros((2, 64))) == 2 * 64 * 4 + 2 * 32 * 4
