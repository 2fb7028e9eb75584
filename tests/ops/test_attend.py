"""attend against rope and sdpa in float64, and what it refuses."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from qrun import ops
from qrun.ops.attend import attend_ref
from qrun.ops.rms_norm import rms_norm_ref
from qrun.ops.rope import rope_ref

SEEDS = (0, 1, 2)


def _table(capacity: int, inverse: np.ndarray) -> mx.array:
    angle = np.arange(capacity)[:, None] * inverse
    return mx.array(np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "d", "rotated", "offset", "window", "norm"),
    [
        (1, 1, 9, 3, 64, 64, 40, 0, False),
        (2, 1, 4, 2, 32, 16, 0, 0, True),
        (1, 1, 2, 1, 128, 128, 63, 9, True),
        (2, 5, 4, 1, 64, 64, 11, 7, False),
    ],
)
def test_attend(
    seed: int,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    d: int,
    rotated: int,
    offset: int,
    window: int,
    norm: bool,
) -> None:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32))

    capacity = 64
    qkv = normal(batch * length, (heads + 2 * kv_heads) * d)
    k, v = normal(batch, kv_heads, capacity, d), normal(batch, kv_heads, capacity, d)
    k_ref, v_ref = np.array(k, np.float64), np.array(v, np.float64)
    inverse = 1 / 10000 ** (np.arange(rotated // 2) / (rotated / 2))
    qn, kn = (normal(d), normal(d)) if norm else (None, None)
    y, k, v = ops.attend(
        qkv,
        k,
        v,
        mx.array([offset] * 4, mx.int32),
        _table(capacity, inverse),
        heads=heads,
        q_norm=qn,
        k_norm=kn,
        eps=1e-6,
        scale=d**-0.5,
        window=window,
        softcap=3.0,
    )

    x = np.array(qkv, np.float64).reshape(batch, length, -1, d).transpose(0, 2, 1, 3)
    xq, xk, xv = x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]
    if qn is not None and kn is not None:
        xq = rms_norm_ref(xq, np.array(qn, np.float64), 1e-6)
        xk = rms_norm_ref(xk, np.array(kn, np.float64), 1e-6)
    at = np.arange(offset, offset + length)
    k_ref[:, :, at], v_ref[:, :, at] = rope_ref(xk, at, inverse), xv
    how: dict[str, float] = {"scale": d**-0.5, "softcap": 3.0}
    want = attend_ref(xq, k_ref, v_ref, offset, inverse, window=window, **how)
    np.testing.assert_allclose(np.array(y, np.float64), want, atol=1e-5)
    np.testing.assert_allclose(np.array(k, np.float64), k_ref, atol=1e-5)
    np.testing.assert_array_equal(np.array(v, np.float64), v_ref)


def test_attend_names_what_does_not_fit() -> None:
    k = v = mx.zeros((1, 2, 8, 16))
    offset, table = mx.zeros(4, mx.int32), mx.zeros((8, 8, 2))
    with pytest.raises(ValueError, match="qkv"):
        ops.attend(mx.zeros((1, 50)), k, v, offset, table, heads=4, scale=1.0)
    with pytest.raises(ValueError, match="kv heads"):
        ops.attend(mx.zeros((1, 7 * 16)), k, v, offset, table, heads=3, scale=1.0)
