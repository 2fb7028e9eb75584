"""The Metal swiglu, run by the emulator."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import _metal
from qrun.ops._metal_product import ACTIVATIONS
from tests.ops import metal_support as support
from tests.ops.metal_epilogues import assert_each, behind64
from tests.ops.metal_support import DTYPES, run

PAIRED = [name for name, pairs in ACTIVATIONS.items() if pairs]


@pytest.mark.parametrize("activation", PAIRED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 34), (2, 514)])
def test_gated(shape: tuple[int, int], dtype: mx.Dtype, activation: str) -> None:
    gate_up = support.normal(np.random.default_rng(1), shape, dtype) * 4
    y = _metal.swiglu(gate_up, activation=activation, run=run)
    assert y.dtype == dtype
    assert_each(y, partial(behind64, activation=activation), {"y": support.numbers(gate_up)})


def test_large_values_stay_finite() -> None:
    gate_up = mx.array([[-1e4, 2, 1e4, 2, -200, 1, 100, 1]], mx.float32)
    for activation in ("swiglu", "geglu"):
        y = _metal.swiglu(gate_up, activation=activation, run=run)
        np.testing.assert_allclose(support.numbers(y), [[0, 2e4, 0, 100]], atol=1e-30)
