"""A transformer layer of SmolLM2's head and group sizes, all of it Metal kernels in the emulator.

What the single tests cannot see: caches written in place by one call and read by the next, prefill
and decode through different kernels.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from qrun.ops import _metal
from tests.ops import metal_support as support
from tests.ops.metal_epilogues import behind64
from tests.ops.metal_support import run

HEADS, KV_HEADS, DIM, CAPACITY = 3, 1, 64, 16
WIDTH, HIDDEN, EPS = HEADS * DIM, 256, 1e-5


class Layer:
    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.qkv = support.matrix((HEADS + 2 * KV_HEADS) * DIM, WIDTH, seed=1)
        self.out = support.matrix(WIDTH, WIDTH, seed=2)
        self.gate_up = support.matrix(2 * HIDDEN, WIDTH, seed=3)
        self.down = support.matrix(WIDTH, HIDDEN, seed=4)
        self.norms = [1 + 0.1 * support.normal(rng, (WIDTH,), mx.float32) for _ in range(2)]
        angles = np.arange(CAPACITY)[:, None] * 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
        self.table = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        cache = (1, KV_HEADS, CAPACITY, DIM)
        self.k, self.v = mx.zeros(cache), mx.zeros(cache)

    def step(self, x: mx.array, offset: int) -> mx.array:
        """x (L, WIDTH): tokens at offset, offset + 1, ..."""
        product = _metal.qmv if x.shape[0] <= 4 else _metal.qmm
        at = mx.array([offset], mx.int32)
        qkv = product(x, self.qkv, norm=(self.norms[0], EPS), run=run)
        q, self.k, self.v = _metal.rope(
            qkv[None],
            self.k,
            self.v,
            at,
            mx.array(self.table.astype(np.float32)),
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            run=run,
        )
        seen = _metal.sdpa(q, self.k, self.v, at, scale=DIM**-0.5, run=run)[0]
        x = product(seen, self.out, residual=x, run=run)
        gated = product(x, self.gate_up, norm=(self.norms[1], EPS), activation="swiglu", run=run)
        return product(gated, self.down, residual=x, run=run)

    def reference(self, x: np.ndarray) -> np.ndarray:
        """All tokens at once, float64."""
        length = len(x)

        def norm(x: np.ndarray, weight: mx.array) -> np.ndarray:
            root = np.sqrt((x**2).mean(1, keepdims=True) + EPS)
            return x / root * support.numbers(weight)

        def turn(a: np.ndarray) -> np.ndarray:
            cosine, sine = self.table[:length, None].transpose(3, 0, 1, 2)
            first, second = np.split(a, 2, axis=-1)
            turned = [first * cosine - second * sine, first * sine + second * cosine]
            return np.concatenate(turned, axis=-1)

        qkv = (norm(x, self.norms[0]) @ self.qkv.values.T).reshape(length, -1, DIM)
        q, k, v = turn(qkv[:, :HEADS]), turn(qkv[:, HEADS : HEADS + 1]), qkv[:, HEADS + 1 :]
        scores = np.einsum("lhd,sgd->hls", q, k) * DIM**-0.5
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        seen = np.einsum("hls,sgd->lhd", weights, v).reshape(length, WIDTH)
        x = x + seen @ self.out.values.T
        gated = behind64(norm(x, self.norms[1]) @ self.gate_up.values.T, activation="swiglu")
        return x + gated @ self.down.values.T


def test_prefill_then_decode() -> None:
    layer = Layer()
    x = support.normal(np.random.default_rng(9), (13, WIDTH), mx.float32)
    expected = layer.reference(support.numbers(x))
    got: list[mx.array] = []
    for start, end in ((0, 9), (9, 10), (10, 12), (12, 13)):
        got.append(layer.step(x[start:end], start))
    y = support.numbers(mx.concatenate(got))
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()
