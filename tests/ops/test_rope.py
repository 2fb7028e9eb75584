from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import rope
from qrun.ops.rms_norm import rms_norm_ref
from qrun.ops.rope import rope_bytes, rope_ref
from tests.ops.matrices import DTYPES, f64, inputs, ulp

H, HKV, C = 4, 2, 24


def frequencies(rotated: int) -> Any:
    return 100.0 ** (-np.arange(0, rotated, 2) / rotated)


def table(rotated: int) -> mx.array:
    angle = np.arange(C)[:, None] * frequencies(rotated)
    return mx.array(np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32))


def offset(n: int) -> mx.array:
    return mx.array([n], mx.int32)


def heads_of(qkv: Any, batch: int, d: int) -> Any:
    """qkv (B*L, W) -> q, k, v (B, heads, L, D), float64."""
    x = f64(qkv).reshape(batch, -1, H + 2 * HKV, d).swapaxes(1, 2)
    return x[:, :H], x[:, H : H + HKV], x[:, H + HKV :]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "rotated"), [(8, 8), (64, 64), (64, 32), (20, 6), (256, 256)])
@pytest.mark.parametrize(("batch", "length", "at"), [(1, 1, 0), (1, 1, 23), (1, 9, 5), (2, 3, 4)])
@pytest.mark.parametrize("norms", [False, True])
def test_rotates_and_appends(
    backend: Any, batch: int, length: int, at: int, d: int, rotated: int, norms: bool, dtype: str
) -> None:
    qkv = inputs(batch * length, (H + 2 * HKV) * d, dtype)
    caches = [inputs(batch * HKV, C * d, dtype, i).reshape(batch, HKV, C, d) for i in (1, 2)]
    before = [f64(cache) for cache in caches]
    weights = [inputs(1, d, "float32", i)[0] if norms else None for i in (3, 4)]
    q, k_cache, v_cache = rope(
        qkv,
        *caches,
        offset(at),
        table(rotated),
        heads=H,
        q_norm=weights[0],
        k_norm=weights[1],
        eps=1e-6,
    )
    want_q, want_k, want_v = heads_of(qkv, batch, d)
    if norms:
        want_q = rms_norm_ref(want_q, f64(weights[0]), 1e-6)
        want_k = rms_norm_ref(want_k, f64(weights[1]), 1e-6)
    positions = np.arange(at, at + length)
    want_q = rope_ref(want_q, positions, frequencies(rotated))
    before[0][:, :, at : at + length] = rope_ref(want_k, positions, frequencies(rotated))
    before[1][:, :, at : at + length] = want_v
    assert q.dtype == k_cache.dtype == v_cache.dtype == DTYPES[dtype]
    for got, want in ((q, want_q), (k_cache, before[0])):
        assert got.shape == want.shape
        size = np.abs(want).max()
        # One rounding of the result; the table, two products and the norm's factor in float32.
        assert np.abs(f64(got) - want).max() <= ulp(size, dtype) / 2 + 6 * ulp(size, "float32")
    assert np.array_equal(f64(v_cache), before[1])


def test_steps_one_by_one_equal_all_at_once(backend: Any) -> None:
    d = 16
    qkv = inputs(6, (H + 2 * HKV) * d, "float32")
    empty = mx.zeros((1, HKV, C, d))
    whole = rope(qkv, empty + 0, empty + 0, offset(3), table(d), heads=H)
    k, v, qs = empty + 0, empty + 0, []
    for i in range(6):
        q, k, v = rope(qkv[i : i + 1], k, v, offset(3 + i), table(d), heads=H)
        qs.append(f64(q))
    assert np.array_equal(np.concatenate(qs, 2), f64(whole[0]))
    assert np.array_equal(f64(k), f64(whole[1]))
    assert np.array_equal(f64(v), f64(whole[2]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": mx.zeros((1, 65))}, "axis W of qkv is 65, must be 64"),
        ({"v_cache": mx.zeros((1, HKV, 4, 16))}, "axis D of v_cache is 16, must be 8"),
        ({"offset": mx.zeros((1,))}, "offset has dtype float32, must be one of int32"),
        ({"table": mx.zeros((4, 5, 2))}, "table rotates 10 dims, the head has 8"),
        ({"q_norm": mx.zeros((7,))}, "axis D of q_norm is 7, must be 8"),
    ],
)
def test_broken_contract_is_named(change: dict[str, Any], message: str) -> None:
    arguments = {
        "qkv": mx.zeros((1, 64)),
        "k_cache": mx.zeros((1, HKV, 4, 8)),
        "v_cache": mx.zeros((1, HKV, 4, 8)),
        "offset": offset(0),
        "table": mx.zeros((4, 4, 2)),
        "heads": H,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        rope(**arguments)


def test_bytes() -> None:
    assert rope_bytes(mx.zeros((2, 64))) == 2 * 2 * 64 * 4
