"""argmax: the first of the largest; -1 where logits cannot be trusted."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import argmax
from qrun.ops.argmax import argmax_ref


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1000, 49152])
def test_first_of_the_largest(backend: Any, vocab: int, dtype: mx.Dtype) -> None:
    x = mx.array(np.random.default_rng(vocab).normal(0, 2, (3, vocab)).astype(np.float32))
    x = x.astype(dtype)  # 16-bit types make ties
    got = argmax(x)
    assert got.dtype == mx.int32
    assert np.array_equal(np.array(got), argmax_ref(np.array(x.astype(mx.float32))))


@pytest.mark.parametrize("at", [0, 16, 99])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_case_05_minus_one_where_a_logit_is_not_finite(backend: Any, bad: float, at: int) -> None:
    x = np.zeros((2, 100), np.float32)
    x[1, at] = bad
    assert np.array(argmax(mx.array(x))).tolist() == [0, -1]
