"""The Metal embedding, run by the emulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import _metal
from tests.ops import metal_support as support
from tests.ops.metal_support import DTYPES, run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_decode(bits: int, dtype: mx.Dtype) -> None:
    m = support.matrix(30, 192, bits)
    for ids in (mx.array([29], mx.int32), mx.array([[0, 3, 3, 17, 1], [2, 9, 28, 4, 5]], mx.int32)):
        y = _metal.embedding(ids, m, dtype=dtype, run=run)
        expected = support.round_to(m.values[np.array(ids)], dtype)
        np.testing.assert_array_equal(support.numbers(y), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_micro(mode: str, dtype: mx.Dtype) -> None:
    m = support.micro(12, 96, mode)
    y = _metal.embedding(mx.array([5, 11], mx.int32), m, dtype=dtype, run=run)
    expected = support.round_to(m.values[[5, 11]], dtype)
    np.testing.assert_array_equal(support.numbers(y), expected)


def test_foreign_id_is_zero() -> None:
    m = support.matrix(12, 64)
    y = _metal.embedding(mx.array([-1, 12], mx.int32), m, dtype=mx.float32, run=run)
    assert not mx.any(y)
