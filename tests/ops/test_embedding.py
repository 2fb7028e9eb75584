from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import QuantizedMatrix, embedding
from qrun.ops.embedding import embedding_bytes, embedding_ref
from tests.ops.matrices import DTYPES, WIDTHS, f64, sample, ulp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", WIDTHS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_rows_are_exact(backend: Any, bits: int, group: int, dtype: str) -> None:
    truth = sample(33, WIDTHS[group][1], bits, group)
    ids = mx.array([32, 0, 7, 7, 1], mx.int32)
    y = embedding(ids, truth.matrix(33), dtype=DTYPES[dtype])
    assert y.dtype == DTYPES[dtype]
    want = f64(mx.array(truth.rounded).astype(DTYPES[dtype]))
    assert np.array_equal(f64(y), want[np.array(ids)])


def test_dense_is_the_whole_matrix(backend: Any) -> None:
    truth = sample(33, 192, 4, 64)
    assert np.array_equal(f64(truth.matrix(33).dense()), truth.rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_is_applied_in_front_of_the_rounding(backend: Any, dtype: str) -> None:
    truth = sample(33, 192, 4, 64)
    ids = mx.array([3, 32], mx.int32)
    y = embedding(ids, truth.matrix(33), dtype=DTYPES[dtype], scale=24.0)
    want = embedding_ref(np.array(ids), truth.exact, 24.0)
    size = np.abs(want).max()
    assert np.abs(f64(y) - want).max() <= ulp(size, dtype) / 2 + ulp(size, "float32")


@pytest.mark.parametrize(
    ("ids", "message"),
    [(mx.zeros((2, 2), mx.int32), r"axes \(L\)"), (mx.zeros((2,)), "ids has dtype float32")],
)
def test_broken_contract_is_named(ids: mx.array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embedding(ids, sample(33, 64, 4, 64).matrix(33))


def test_bytes_count_the_rows_taken() -> None:
    truth = sample(33, 64, 4, 64)
    m = QuantizedMatrix.of(mx.array(truth.w), truth.scales, truth.biases, truth.spec)
    assert embedding_bytes(mx.zeros((2,), mx.int32), m) == 2 * (64 // 2 + 2 * 2 + 64 * 4)
