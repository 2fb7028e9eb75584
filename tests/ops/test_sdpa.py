from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import sdpa
from qrun.ops.sdpa import sdpa_bytes, sdpa_ref
from tests.ops.matrices import DTYPES, f64, inputs, ulp


def cache(batch: int, heads: int, capacity: int, d: int, dtype: str, seed: int) -> mx.array:
    return inputs(batch * heads * capacity, d, dtype, seed).reshape(batch, heads, capacity, d)


def offset(n: int) -> mx.array:
    return mx.array([n], mx.int32)


def assert_close(got: mx.array, want: Any, dtype: str, more: Any = 0.0) -> None:
    """One rounding of the result, and float32 noise: the values are means of about unit size.

    more: what else it may be off by, of want's shape.
    """
    assert got.shape == want.shape
    assert str(got.dtype) == f"mlx.core.{dtype}"
    bound = ulp(np.abs(want).max(), dtype) / 2 + 32 * ulp(1.0, "float32")
    assert (np.abs(f64(got) - want) <= bound + more).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [8, 64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (9, 3), (4, 4)])
@pytest.mark.parametrize(("length", "at"), [(1, 0), (1, 130), (7, 0), (33, 20)])
def test_equals_float64(
    backend: Any, length: int, at: int, heads: int, kv_heads: int, d: int, dtype: str
) -> None:
    q = cache(1, heads, length, d, dtype, 0)
    k, v = (cache(1, kv_heads, 160, d, dtype, i) for i in (1, 2))
    got = sdpa(q, k, v, offset(at), scale=d**-0.5)
    more = 0.0
    if backend.NAME == "cuda" and dtype != "float32":  # tensor cores: probabilities in 16 bits
        more = ulp(1.0, dtype) / 2 * sdpa_ref(f64(q), f64(k), np.abs(f64(v)), at, scale=d**-0.5)
    assert_close(got, sdpa_ref(f64(q), f64(k), f64(v), at, scale=d**-0.5), dtype, more)


@pytest.mark.parametrize("window", [1, 3, 64, 1000])
@pytest.mark.parametrize(("length", "at"), [(1, 100), (33, 20)])
def test_window(backend: Any, length: int, at: int, window: int) -> None:
    q = cache(1, 4, length, 32, "float32", 0)
    k, v = (cache(1, 2, 128, 32, "float32", i) for i in (1, 2))
    got = sdpa(q, k, v, offset(at), scale=0.2, window=window)
    assert_close(got, sdpa_ref(f64(q), f64(k), f64(v), at, scale=0.2, window=window), "float32")


def test_softcap(backend: Any) -> None:
    q = cache(1, 4, 5, 32, "float32", 0) * 10
    k, v = (cache(1, 2, 128, 32, "float32", i) for i in (1, 2))
    got = sdpa(q, k, v, offset(40), scale=0.2, softcap=5.0)
    assert_close(got, sdpa_ref(f64(q), f64(k), f64(v), 40, scale=0.2, softcap=5.0), "float32")


def test_case_06_sequences_of_a_batch_do_not_mix(backend: Any) -> None:
    q = cache(3, 4, 5, 32, "float32", 0)
    k, v = (cache(3, 2, 64, 32, "float32", i) for i in (1, 2))
    got = f64(sdpa(q, k, v, offset(9), scale=0.2)).reshape(3, 5, -1)
    for b in range(3):
        alone = sdpa(q[b : b + 1], k[b : b + 1], v[b : b + 1], offset(9), scale=0.2)
        assert np.array_equal(got[b], f64(alone))


def test_what_lies_behind_the_newest_token_does_not_matter(backend: Any) -> None:
    """The cache is allocated, not written: it may hold NaN."""
    q = cache(1, 4, 3, 32, "float32", 0)
    k, v = (cache(1, 2, 64, 32, "float32", i) for i in (1, 2))
    clean = f64(sdpa(q, k, v, offset(5), scale=0.2))
    behind = (mx.arange(64) >= 8)[:, None]
    dirty = [mx.where(behind, float("nan"), a) for a in (k, v)]
    assert np.array_equal(f64(sdpa(q, *dirty, offset(5), scale=0.2)), clean)


def test_large_scores_do_not_overflow(backend: Any) -> None:
    q = cache(1, 2, 2, 64, "float32", 0) * 1e3
    k, v = (cache(1, 1, 32, 64, "float32", i) for i in (1, 2))
    got = f64(sdpa(q, k, v, offset(20), scale=1.0))
    want = sdpa_ref(f64(q), f64(k), f64(v), 20, scale=1.0)
    assert np.abs(got - want).max() <= 1e-2  # scores of 3e4, themselves rounded to 2e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": mx.zeros((1, 3, 1, 8))}, "3 heads are no multiple of 2 kv heads"),
        ({"k_cache": mx.zeros((1, 2, 4, 16))}, "axis D of k_cache is 16, must be 8"),
        ({"v_cache": mx.zeros((1, 2, 5, 8))}, "axis C of v_cache is 5, must be 4"),
        ({"offset": mx.zeros((1,), mx.uint32)}, "offset has dtype uint32"),
    ],
)
def test_broken_contract_is_named(change: dict[str, Any], message: str) -> None:
    arguments = {
        "q": mx.zeros((1, 4, 1, 8)),
        "k_cache": mx.zeros((1, 2, 4, 8)),
        "v_cache": mx.zeros((1, 2, 4, 8)),
        "offset": offset(0),
        "scale": 1.0,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        sdpa(**arguments)


def test_bytes() -> None:
    q, k = mx.zeros((1, 4, 1, 8)), mx.zeros((1, 2, 64, 8))
    assert sdpa_bytes(q, k, 10) == (2 * 4 * 8 + 2 * 2 * 10 * 8) * 4
