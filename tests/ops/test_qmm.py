"""qmm: qmv's contract for many rows. Decoding and refusals are tested there for both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qrun.ops import qmm, qmv
from qrun.ops.qmm import qmm_flops, qmm_ref
from tests.ops.matrices import (
    DTYPES,
    PAIRS,
    assert_sums,
    f64,
    inputs,
    products,
    sample,
    ulp,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "group", "k"), [(4, 32, 96), (4, 64, 576), (4, 128, 4864), (8, 32, 896), (8, 64, 64)]
)
def test_case_01_02_03_sums_in_float32_for_every_shape(
    backend: Any, bits: int, group: int, k: int, dtype: str
) -> None:
    truth = sample(1024, k, bits, group)
    x, exact, error = products(130, 1024, k, bits, group, dtype)
    for rows, columns in (*PAIRS, (64, 97), (130, 33)):
        y = qmm(x[:rows], truth.matrix(columns))
        label = f"M {rows} N {columns} K {k}"
        assert y.dtype == x.dtype
        assert_sums(y, exact[:rows, :columns], error, label)


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_other_widths_of_codes(backend: Any, bits: int) -> None:
    truth = sample(97, 576, bits, 64)
    x, exact, error = products(33, 97, 576, bits, 64, "float32")
    assert_sums(qmm(x, truth.matrix(97)), exact, error, f"{bits} bits")
    assert np.array_equal(exact, qmm_ref(f64(x), truth.exact))


def test_epilogue_equals_qmv(backend: Any) -> None:
    truth = sample(66, 576, 4, 32)
    m = truth.matrix(66)
    x, bias = inputs(40, 576, "float32"), inputs(1, 66, "float32", 1)[0]
    residual, weight = inputs(40, 33, "float32", 2), inputs(1, 576, "float32", 3)[0]
    options: dict[str, Any] = {"norm": (weight, 1e-5), "bias": bias, "activation": "swiglu"}
    many = f64(qmm(x, m, residual=residual, scale=0.5, **options))
    rows = [
        f64(qmv(x[i : i + 1], m, residual=residual[i : i + 1], scale=0.5, **options))
        for i in range(40)
    ]
    few = np.concatenate(rows)
    # Two float32 sums of 576 terms in different orders, times an activation of slope about one.
    assert np.abs(many - few).max() <= 32 * ulp(np.abs(few).max(), "float32")


def test_case_06_rows_do_not_depend_on_their_neighbours(backend: Any) -> None:
    truth = sample(97, 576, 4, 32)
    m = truth.matrix(97)
    x = inputs(64, 576, "float32")
    alone = f64(qmm(x, m))
    other = f64(qmm(x.at[1:].multiply(1e4), m))
    assert np.array_equal(alone[0], other[0])


def test_flops() -> None:
    truth = sample(97, 576, 4, 32)
    assert qmm_flops(inputs(33, 576, "float32"), truth.matrix(97)) == 2 * 33 * 97 * 576
