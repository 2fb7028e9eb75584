from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import rms_norm, rms_norm_parts
from qrun.ops.rms_norm import rms_norm_bytes, rms_norm_ref
from tests.ops.matrices import DTYPES, f64, inputs, ulp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 3, 64, 576, 4864])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_equals_float64_to_one_rounding(backend: Any, rows: int, k: int, dtype: str) -> None:
    x, weight = inputs(rows, k, dtype), inputs(1, k, "float32", 1)[0]
    y = rms_norm(x, weight, 1e-5)
    want = rms_norm_ref(f64(x), f64(weight), 1e-5)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    # Half an ulp for the result; rsqrt and two products in float32 in front of it, and the sum of K
    # squares, whose roundings walk at random (the root halves their effect).
    size = np.abs(want).max()
    assert np.abs(f64(y) - want).max() <= ulp(size, dtype) / 2 + (4 + k**0.5 / 4) * ulp(
        size, "float32"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 3, 15, 64, 70, 576, 4864])
@pytest.mark.parametrize("mean", [0, 1000])
def test_centered_is_a_layer_norm(backend: Any, mean: int, k: int, dtype: str) -> None:
    """A mean of 1000 deviations: mean(x^2) - mean(x)^2 would be off by a tenth of the variance."""
    x = (inputs(3, k, "float32") + mean).astype(DTYPES[dtype])
    weight = inputs(1, k, "float32", 1)[0]
    y = rms_norm(x, weight, 1e-5, centered=True)
    want = rms_norm_ref(f64(x), f64(weight), 1e-5, centered=True)
    assert y.dtype == x.dtype
    # As above, and the roundings of the mean's sum, which the norm makes larger.
    steps, size, most = 4 + k**0.5 / 4, np.abs(want).max(), np.abs(f64(weight)).max()
    shift = steps * ulp(np.abs(f64(x)).max(), "float32") / np.sqrt(f64(x).var(-1).min() + 1e-5)
    bound = ulp(size, dtype) / 2 + steps * ulp(size, "float32") + shift * most
    assert np.abs(f64(y) - want).max() <= bound


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_behind(backend: Any, dtype: str, centered: bool) -> None:
    x, weight, residual = inputs(3, 70, dtype), inputs(1, 70, "float32", 1)[0], inputs(3, 70, dtype)
    y = rms_norm(x, weight, 1e-5, residual=residual, centered=centered)
    want = rms_norm_ref(f64(x), f64(weight), 1e-5, f64(residual), centered)
    assert y.dtype == x.dtype
    size = np.abs(want).max()  # rounded once where it is fused, else twice
    assert np.abs(f64(y) - want).max() <= ulp(size, dtype) + 8 * ulp(size, "float32")


@pytest.mark.parametrize("rows", [1, 5])
def test_parts_of_a_row_are_normed_by_themselves(backend: Any, rows: int) -> None:
    x = inputs(rows, 100, "float32")
    weights = [inputs(1, n, "float32", n)[0] for n in (48, 24)]
    y = f64(rms_norm_parts(x, weights, 1e-5))
    for at, w in zip((0, 48), weights, strict=True):
        part = np.s_[:, at : at + w.size]
        want = rms_norm_ref(f64(x)[part], f64(w), 1e-5)
        assert np.abs(y[part] - want).max() <= 8 * ulp(np.abs(want).max(), "float32")
    assert np.array_equal(y[:, 72:], f64(x)[:, 72:])
    with pytest.raises(ValueError, match="axis K of x is 100, weights are for 144 columns"):
        rms_norm_parts(x, [weights[0]] * 3, 1e-5)


def test_float16_squares_do_not_overflow(backend: Any) -> None:
    """Case 5: 300 squared is no float16; the mean must be taken in float32."""
    x = mx.full((1, 64), 3e4, mx.float16)
    assert np.array_equal(f64(rms_norm(x, mx.ones((64,)), 1e-5)), np.ones((1, 64)))


def test_zeros_give_zeros(backend: Any) -> None:
    assert not f64(rms_norm(mx.zeros((2, 64)), mx.ones((64,)), 1e-5)).any()


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (mx.zeros((2, 64)), mx.zeros((63,)), "axis K of weight is 63, must be 64"),
        (mx.zeros((64,)), mx.zeros((64,)), r"x must have axes \(M, K\)"),
        (mx.zeros((1, 4), mx.uint32), mx.zeros((4,)), "x has dtype uint32"),
    ],
)
def test_broken_contract_is_named(x: mx.array, weight: mx.array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, 1e-5)


def test_bytes() -> None:
    assert rms_norm_bytes(mx.zeros((2, 64)), mx.zeros((64,))) == (2 * 2 * 64 + 64) * 4
