"""Both Metal attention kernels, run by the emulator, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import _metal
from qrun.ops._metal_rows import sdpa_decode_call, sdpa_merge_call
from tests.ops import metal_support as support
from tests.ops.metal_support import DTYPES, run


@dataclass
class Case:
    """Random q and caches; what lies past the valid keys must not matter, so it is huge."""

    length: int
    offset: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    capacity: int = 80
    batch: int = 1
    dtype: mx.Dtype = mx.float16
    window: int = 0
    softcap: float = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.length + self.offset)
        held = self.offset + self.length
        cache = (self.batch, self.kv_heads, self.capacity, self.dim)
        past = mx.arange(self.capacity)[:, None] >= held
        self.q = support.normal(rng, (self.batch, self.heads, self.length, self.dim), self.dtype)
        self.k = mx.where(past, 1e4, support.normal(rng, cache, self.dtype)).astype(self.dtype)
        self.v = mx.where(past, 1e4, support.normal(rng, cache, self.dtype)).astype(self.dtype)
        self.at = mx.array([self.offset], mx.int32)
        self.options = {
            "scale": self.dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
        }

    def reference(self) -> np.ndarray:
        held, group = self.offset + self.length, self.heads // self.kv_heads
        q = support.numbers(self.q)
        k = np.repeat(support.numbers(self.k)[:, :, :held], group, axis=1)
        v = np.repeat(support.numbers(self.v)[:, :, :held], group, axis=1)
        scores = q @ k.swapaxes(2, 3) * self.dim**-0.5
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        i = self.offset + np.arange(self.length)[:, None]
        j = np.arange(held)
        seen = (j <= i) & ((j > i - self.window) | (self.window == 0))
        weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        out = weights / weights.sum(-1, keepdims=True) @ v
        return out.swapaxes(1, 2).reshape(self.batch, self.length, self.heads * self.dim)

    def check(self, y: mx.array) -> None:
        """One rounding of the result, and float32 inside."""
        reference = self.reference()
        assert y.dtype == self.dtype
        assert y.shape == reference.shape
        error = np.abs(support.numbers(y) - reference).max()
        assert error <= support.ulp(np.abs(reference).max(), self.dtype) + 2e-6

    def run(self) -> None:
        self.check(_metal.sdpa(self.q, self.k, self.v, self.at, **self.options, run=run))


@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: mx.Dtype, length: int) -> None:
    Case(length, 41, batch=2, dtype=dtype).run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 3, 8, 9, 37])
@pytest.mark.parametrize("offset", [0, 1, 43])
def test_lengths(length: int, offset: int, dtype: mx.Dtype) -> None:
    Case(length, offset, dtype=dtype).run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 4, 40])
@pytest.mark.parametrize("window", [1, 7, 33])
def test_window(length: int, window: int, dtype: mx.Dtype) -> None:
    Case(length, 35, window=window, dtype=dtype).run()


@pytest.mark.parametrize("length", [1, 20])
def test_softcap(length: int) -> None:
    Case(length, 30, softcap=2.5, dtype=mx.float32).run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24, 32, 80, 96, 128, 256])
@pytest.mark.parametrize("length", [2, 20])
def test_head_dims(length: int, dim: int, dtype: mx.Dtype) -> None:
    Case(length, 20, dim=dim, heads=2, kv_heads=1, dtype=dtype).run()


@pytest.mark.parametrize("heads", [(9, 3), (14, 2), (3, 3), (24, 1)])
def test_groups(heads: tuple[int, int]) -> None:
    """Groups of 3, 7, 1 and 24 query heads; 24 are served in three chunks of 8."""
    Case(1, 30, heads=heads[0], kv_heads=heads[1]).run()


def test_float32_tiles_of_256() -> None:
    """Tiles that are copied, not held; more than one of keys, the last one not whole."""
    Case(18, 3, dim=256, heads=1, kv_heads=1, dtype=mx.float32, window=11).run()


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("splits", [2, 8, 32])
def test_split_context(splits: int, window: int) -> None:
    """More splits than keys too: empty ones must weigh nothing."""
    case = Case(2, 27, heads=6, batch=2, window=window)
    arrays = (case.q, case.k, case.v, case.at)
    values, stats = run(sdpa_decode_call(*arrays, **case.options, splits=splits))
    (y,) = run(sdpa_merge_call(values, stats, mx.float16))
    case.check(y)


def test_long_context_splits_by_itself() -> None:
    Case(1, 1020, heads=2, kv_heads=1, capacity=1030).run()


def test_keys_are_read_once() -> None:
    """Grouped heads share the reads of decode: each valid byte of the caches once, none beyond."""
    case = Case(1, 49, heads=8, kv_heads=2)
    outputs = run(sdpa_decode_call(case.q, case.k, case.v, case.at, **case.options))
    for name in ("k_cache", "v_cache"):
        cache = outputs.counters.buffers[name]
        assert cache.read_bytes == cache.bytes * 50 // 80
        assert cache.most_reads == 1
        assert min(cache.reads) >= 4
