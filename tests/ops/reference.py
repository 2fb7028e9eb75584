"""Float64 references for the kernel tests. Bits are unpacked here, with nobody's help."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def f64(a: mx.array) -> Array:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def unpack(w: NDArray[np.uint32], bits: int) -> NDArray[np.int64]:
    """(N, K*bits/32) little-endian bit stream -> codes (N, K)."""
    bytes_ = np.ascontiguousarray(w).view(np.uint8)
    stream = np.unpackbits(bytes_, axis=1, bitorder="little")
    codes = stream.reshape(w.shape[0], -1, bits).astype(np.int64)
    return codes @ (1 << np.arange(bits))


class Matrix:
    """A random quantized matrix: w, scales, biases as MLX keeps them, and `dense` in float64."""

    def __init__(
        self, rng: np.random.Generator, n: int, k: int, bits: int, group: int, scales: str
    ) -> None:
        self.n, self.k, self.bits, self.group, self.scale_dtype = n, k, bits, group, DTYPES[scales]
        w = rng.integers(0, 1 << 32, (n, k * bits // 32), dtype=np.uint32)
        self.w = mx.array(w)
        s = rng.normal(0, 1, (n, k // group)) / (1 << bits)
        b = rng.normal(0, 1, (n, k // group))
        self.scales = mx.array(s).astype(self.scale_dtype)
        self.biases = mx.array(b).astype(self.scale_dtype)
        codes = unpack(w, bits).astype(np.float64)
        s64, b64 = (np.repeat(f64(a), group, axis=1) for a in (self.scales, self.biases))
        self.dense: Array = s64 * codes + b64
        # The contract's rounding: scale*q and then + bias, both in float32.
        self.dense32 = (s64.astype(np.float32) * codes.astype(np.float32)).astype(
            np.float32
        ) + b64.astype(np.float32)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def ulp(value: float, dtype: str) -> float:
    """The step between neighbours of |value| in dtype."""
    digits = {"float32": 23, "float16": 10, "bfloat16": 7}[dtype]
    return 2.0 ** (math.floor(math.log2(max(abs(value), 1e-30))) - digits)


def assert_accumulates(y: mx.array, ref: Array, plain: Array, dtype: str) -> None:
    """|kernel - ref| <= 2 |plain op in that dtype - ref| + one ulp of max |ref|."""
    allowed = 2 * np.abs(plain - ref).max() + ulp(float(np.abs(ref).max()), dtype)
    worst = float(np.abs(f64(y) - ref).max())
    assert worst <= allowed, f"error {worst:.3g}, allowed {allowed:.3g}"


def round_to(x: Array, dtype: str) -> Array:
    return f64(mx.array(x.astype(np.float32)).astype(DTYPES[dtype]))


def sdpa(
    q: Array, k: Array, v: Array, offset: int, scale: float, window: int = 0, softcap: float = 0
) -> Array:
    """q (B, H, L, D), k and v (B, Hkv, >= offset + L, D) -> (B, L, H*D)."""
    b, h, l, d = q.shape
    s = offset + l
    k, v = (np.repeat(a[:, :, :s], h // a.shape[1], axis=1) for a in (k, v))
    scores = q @ k.swapaxes(-1, -2) * scale
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    i, j = np.arange(offset, s)[:, None], np.arange(s)[None]
    visible = (j <= i) & ((j > i - window) if window else True)
    scores = np.where(visible, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v).swapaxes(1, 2).reshape(b, l, h * d)


def rotate(x: Array, table: Array, offset: int) -> Array:
    """x (..., L, D), table (C, R/2, 2)."""
    half = table.shape[1]
    c, s = (table[offset : offset + x.shape[-2], :, i] for i in (0, 1))
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)
