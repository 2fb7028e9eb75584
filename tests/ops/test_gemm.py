"""gemm: dense products with the epilogues of qmv, on every backend that runs here."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import gemm
from qrun.ops.gemm import gemm_bytes, gemm_ref
from tests.ops.matrices import DTYPES, assert_sums, error_of, f64, inputs, plain_product


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 7, 33), (5, 64, 130), (33, 10, 896)])
def test_sums_in_float32(backend: Any, m: int, n: int, k: int, dtype: str) -> None:
    x, w = inputs(m, k, dtype), inputs(n, k, dtype, seed=1)
    many_x, many_w = inputs(40, k, dtype, seed=2), inputs(40, k, dtype, seed=3)
    plain = plain_product(f64(many_x), f64(many_w).astype(np.float32))
    error = error_of(plain, f64(many_x) @ f64(many_w).T, DTYPES[dtype])
    assert_sums(gemm(x, w), gemm_ref(f64(x), f64(w)), error, f"{m}x{n}x{k}")


@pytest.mark.parametrize("activation", [None, "swiglu", "geglu"])
def test_epilogue(backend: Any, activation: Any) -> None:
    x, w, bias = inputs(4, 48, "float32"), inputs(20, 48, "float32"), inputs(1, 20, "float32")[0]
    residual = inputs(4, 10 if activation else 20, "float32", seed=5)
    got = gemm(x, w, bias=bias, residual=residual, activation=activation, scale=0.5)
    want = gemm_ref(
        f64(x), f64(w), bias=f64(bias), residual=f64(residual), activation=activation, scale=0.5
    )
    assert np.abs(f64(got) - want).max() <= 2e-6 * np.abs(want).max()


def test_a_broken_contract_names_the_axis(backend: Any) -> None:
    x, w = mx.zeros((2, 8)), mx.zeros((5, 8))
    with pytest.raises(ValueError, match="axis K of w is 7, must be 8"):
        gemm(x, w[:, :7])
    with pytest.raises(ValueError, match="axis N of w is 5, must be even"):
        gemm(x, w, activation="swiglu")
    assert gemm_bytes(x, w) == 4 * (16 + 40 + 10)
