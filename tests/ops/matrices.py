"""Random matrices whose values are known without unpacking a bit, and the bounds of a product.

Two questions a test asks of a product (see DESIGN): does it decode the matrix exactly, and does it
sum no worse than twice a plain float32 loop over the same values that is rounded once?
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from qrun.ops import QuantizedMatrix
from qrun.quantization import Quantization
from tests.tiny import pack_bits

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
MANTISSA = {"float32": 23, "float16": 10, "bfloat16": 7}
# The K of real models beside the smallest possible: 576, 896 and 4864 are no multiples of 512.
WIDTHS = {32: (32, 96, 576, 896), 64: (64, 192, 576, 4864), 128: (128, 384, 896, 4864)}
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33)
COLUMNS = (1, 3, 7, 8, 9, 31, 33, 97, 1024)
# Every number of rows, every number of columns; not every pair.
PAIRS = tuple((m, 97) for m in ROWS) + tuple((m, n) for m in (1, 4, 17) for n in COLUMNS)


@dataclass(frozen=True)
class Sample:
    """w, scales, biases as a file holds them, the exact values (N, K) and float32 roundings."""

    w: npt.NDArray[np.uint32]
    scales: mx.array
    biases: mx.array
    spec: Quantization
    exact: npt.NDArray[np.float64]
    rounded: npt.NDArray[np.float32]  # scale * q + bias, each operation in float32

    def matrix(self, n: int) -> QuantizedMatrix:
        """The first n rows, packed as the current backend wants them."""
        whole = QuantizedMatrix.of(
            mx.array(self.w[:n]), self.scales[:n], self.biases[:n], self.spec
        )
        return whole.pack()


@cache
def sample(n: int, k: int, bits: int, group_size: int, scale_dtype: str = "float16") -> Sample:
    """A random affine matrix: scales of both signs, biases that do not centre the values."""
    rng = np.random.default_rng((n, k, bits, group_size))
    q = rng.integers(0, 1 << bits, (n, k))
    groups = (n, k // group_size)
    size = 4 / ((1 << bits) - 1)
    s = rng.uniform(0.5, 1.5, groups) * size * rng.choice([-1, 1], groups)
    scales = mx.array(s.astype(np.float32)).astype(DTYPES[scale_dtype])
    biases = mx.array(rng.normal(0, 1, groups).astype(np.float32)).astype(DTYPES[scale_dtype])
    s32, b32 = (np.repeat(np.array(a.astype(mx.float32)), group_size, 1) for a in (scales, biases))
    exact = s32.astype(np.float64) * q + b32
    rounded = s32 * q.astype(np.float32) + b32
    spec = Quantization(bits, group_size)
    return Sample(pack_bits(q, bits), scales, biases, spec, exact, rounded)


def inputs(m: int, k: int, dtype: str, seed: int = 0) -> mx.array:
    """x (m, k), normal values."""
    rng = np.random.default_rng((m, k, seed))
    return mx.array(rng.normal(0, 1, (m, k)).astype(np.float32)).astype(DTYPES[dtype])


def f64(x: mx.array) -> npt.NDArray[np.float64]:
    """The same values in numpy's float64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def plain_product(x: npt.NDArray[Any], w: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """x (M, K) times w (N, K), transposed, as the plainest float32 loop: one sum, term by term."""
    h = x.astype(np.float32)
    y = np.zeros((len(h), len(w)), np.float32)
    for k in range(h.shape[1]):
        y += h[:, k, None] * w[None, :, k]
    return y


@cache
def products(
    rows: int, columns: int, k: int, bits: int, group_size: int, dtype: str
) -> tuple[mx.array, npt.NDArray[np.float64], float]:
    """x (rows, k), its exact products with the first rows of `sample`, the plain loop's error."""
    x, truth = inputs(rows, k, dtype), sample(columns, k, bits, group_size)
    exact = f64(x) @ truth.exact.T
    return x, exact, error_of(plain_product(f64(x), truth.rounded), exact, x.dtype)


def error_of(plain: npt.NDArray[Any], exact: npt.NDArray[Any], dtype: mx.Dtype) -> float:
    """What a plain float32 result is off by, at worst, once it is rounded to dtype."""
    return float(np.abs(f64(mx.array(plain.astype(np.float32)).astype(dtype)) - exact).max())


def ulp(value: float, dtype: str) -> float:
    """The distance of two neighbours of a type at this magnitude."""
    return 2.0 ** (np.floor(np.log2(value)) - MANTISSA[dtype]) if value else 0.0


def assert_sums(got: mx.array, exact: npt.NDArray[Any], error: float, label: str) -> None:
    """The accumulation bound: twice a plain operation's error and one ulp of the largest value.

    error: of a plain float32 loop over sums of this length, rounded once to got's type. It comes
    from many sums even where got is a single one, which the plain loop may hit by luck.
    """
    dtype = str(got.dtype).removeprefix("mlx.core.")
    assert got.shape == exact.shape, label
    allowed = 2 * error + ulp(np.abs(exact).max(), dtype)
    worst = np.abs(f64(got) - exact).max()
    assert worst <= allowed, f"{label}: off by {worst:.3g}, allowed {allowed:.3g}"
