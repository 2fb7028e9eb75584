"""The Metal rope with cache append, run by the emulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import _metal
from tests.ops import metal_support as support
from tests.ops.metal_support import DTYPES, run

CAPACITY = 12


def reference(
    qkv: np.ndarray, table: np.ndarray, offset: int, heads: int, kv_heads: int, dim: int,
    norms: tuple[np.ndarray, np.ndarray] | None, eps: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """q (B, H, L, D), new keys and values (B, Hkv, L, D), float64."""
    batch, length = qkv.shape[:2]
    parts = qkv.reshape(batch, length, heads + 2 * kv_heads, dim).swapaxes(1, 2)
    q, k, v = np.split(parts, [heads, heads + kv_heads], axis=1)
    if norms:
        q, k = (
            a / np.sqrt((a**2).mean(-1, keepdims=True) + eps) * weight
            for a, weight in zip((q, k), norms, strict=True)
        )
    half = table.shape[1]
    cosine, sine = table[offset : offset + length].transpose(2, 0, 1)

    def turn(a: np.ndarray) -> np.ndarray:
        first, second, rest = np.split(a, [half, 2 * half], axis=-1)
        turned = [first * cosine - second * sine, first * sine + second * cosine, rest]
        return np.concatenate(turned, axis=-1)

    return turn(q), turn(k), v


def check(
    dtype: mx.Dtype, *, batch: int = 1, length: int = 1, heads: int = 3, kv_heads: int = 1,
    dim: int = 64, rotated: int = 64, norm: bool = False, offset: int = 5,
) -> None:  # fmt: skip
    rng = np.random.default_rng(1)
    qkv = support.normal(rng, (batch, length, (heads + 2 * kv_heads) * dim), dtype)
    table = support.normal(rng, (CAPACITY, rotated // 2, 2), mx.float32)
    weights = [support.normal(rng, (dim,), mx.float32) for _ in range(2)] if norm else [None] * 2
    before = [support.normal(rng, (batch, kv_heads, CAPACITY, dim), dtype) for _ in range(2)]
    caches = [mx.array(a) for a in before]
    mx.eval(*caches)
    q, k, v = _metal.rope(
        qkv, *caches, mx.array([offset], mx.int32), table, heads=heads, kv_heads=kv_heads,
        head_dim=dim, q_norm=weights[0], k_norm=weights[1], eps=1e-6, run=run,
    )  # fmt: skip
    wide = [support.numbers(a) for a in weights if a is not None]
    expected = reference(
        support.numbers(qkv), support.numbers(table), offset, heads, kv_heads, dim,
        (wide[0], wide[1]) if norm else None, 1e-6,
    )  # fmt: skip
    new = slice(offset, offset + length)
    got = (q, k[:, :, new], v[:, :, new])
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        error = np.abs(support.numbers(a) - b).max()
        assert error <= support.ulp(np.abs(b).max(), dtype) + 1e-6
    for cache, old in zip((k, v), before, strict=True):
        outside = [i for i in range(CAPACITY) if not offset <= i < offset + length]
        assert mx.array_equal(cache[:, :, mx.array(outside)], old[:, :, mx.array(outside)])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: mx.Dtype, norm: bool) -> None:
    check(dtype, norm=norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [16, 32, 64])
def test_partial_rotation(rotated: int, dtype: mx.Dtype) -> None:
    check(dtype, rotated=rotated, norm=True, length=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [24, 32, 80, 256])
def test_head_dims(dim: int, dtype: mx.Dtype) -> None:
    check(dtype, dim=dim, rotated=dim, norm=True)


def test_batch_and_groups() -> None:
    check(mx.bfloat16, batch=2, length=4, heads=6, kv_heads=2, offset=0)
    check(mx.bfloat16, batch=2, length=4, heads=6, kv_heads=2, offset=CAPACITY - 4)
