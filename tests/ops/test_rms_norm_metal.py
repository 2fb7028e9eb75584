"""The Metal rms_norm, run by the emulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import _metal
from tests.ops import metal_support as support
from tests.ops.metal_support import DTYPES, run


@pytest.mark.parametrize("k", [8, 37, 576, 2051, 4864])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [None, 0, 1000])
def test_rms_norm(mean: int | None, dtype: mx.Dtype, k: int) -> None:
    """K off every vector, shorter than a simdgroup, longer than a threadgroup takes at a time.

    A mean: the layer norm of x beside it.
    """
    rng = np.random.default_rng(k)
    x, weight = support.normal(rng, (3, k), dtype) * 2, support.normal(rng, (k,), mx.float32)
    x = x + (mean or 0)
    wide = support.numbers(x)
    if mean is not None:
        wide = wide - wide.mean(1, keepdims=True)
    reference = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * support.numbers(weight)
    y = _metal.rms_norm(x, weight, 1e-5, centered=mean is not None, run=run)
    assert y.dtype == dtype
    error = np.abs(support.numbers(y) - reference).max()
    # The result's rounding, and in float32 those of the sum, the root and two products; and those
    # of the mean, which the norm makes larger.
    most = np.abs(reference).max()
    shift = 2.0**-22 * (mean or 0) / wide.std(1).min() * np.abs(support.numbers(weight)).max()
    assert error <= support.ulp(most, dtype) / 2 + 2.0**-22 * most + shift


def test_leading_axes() -> None:
    x = support.normal(np.random.default_rng(1), (2, 3, 64), mx.float32)
    y = _metal.rms_norm(x, mx.ones((64,)), 0.0, run=run)
    wide = support.numbers(x)
    np.testing.assert_allclose(
        support.numbers(y), wide / np.sqrt((wide**2).mean(-1, keepdims=True)), atol=1e-6
    )
