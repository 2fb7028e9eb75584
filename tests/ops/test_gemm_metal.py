"""The Metal gemm, run by the emulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import _metal
from qrun.ops._metal_geometry import LADDER
from qrun.ops._metal_product import Behind, gemm_call
from tests.ops import metal_support as support
from tests.ops.metal_support import DTYPES, run


@pytest.mark.parametrize("rung", ["1x1", "4x4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulation(dtype: mx.Dtype, rung: str) -> None:
    rng = np.random.default_rng(1)
    x, w = support.normal(rng, (67, 200), dtype), support.normal(rng, (70, 200), dtype)
    reference = support.numbers(x) @ support.numbers(w).T
    y = _metal.gemm(x, w, tile=LADDER[rung], run=run)
    support.assert_bounded(y, reference, x @ w.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("shape", [(5, 9, 1), (33, 10, 35), (2, 65, 37), (40, 36, 68)])
def test_odd_shapes(shape: tuple[int, int, int], by_rows: bool, dtype: mx.Dtype) -> None:
    """Any K: rows that start off an access of 16 bytes are read in smaller ones."""
    rows, n, k = shape
    rng = np.random.default_rng(2)
    x = support.normal(rng, (rows, k + 8), dtype)[:, :k]
    w = support.normal(rng, (n, k) if by_rows else (k, n), dtype)
    if x.size < 8 or w.size < 8:
        x = mx.concatenate([x, x])
        rows = x.shape[0]
    values = support.numbers(w) if by_rows else support.numbers(w).T
    (y,) = run(gemm_call(x, w, Behind(), LADDER["2x2"], by_rows=by_rows))
    support.assert_bounded(y, support.numbers(x) @ values.T, x @ (w.T if by_rows else w))


@pytest.mark.parametrize("held", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_w_has_a_type_of_its_own(dtype: mx.Dtype, held: mx.Dtype) -> None:
    """As in a checkpoint of bfloat16 that computes in float32."""
    rng = np.random.default_rng(5)
    x, w = support.normal(rng, (9, 52), dtype), support.normal(rng, (18, 52), held)
    y = _metal.gemm(x, w, tile=LADDER["1x1"], run=run)
    reference = support.numbers(x) @ support.numbers(w).T
    assert y.dtype == dtype
    error = np.abs(support.numbers(y) - reference).max()
    assert error <= support.ulp(np.abs(reference).max(), dtype) + 1e-5
