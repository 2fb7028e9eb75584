"""For the Metal tests: packed matrices, float64 references, and what runs a kernel.

That is the emulator, and on a Mac the GPU itself, where nothing can be counted or shuffled. The
references unpack bits themselves, in numpy; nothing of qrun or MLX is asked for an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops._metal_call import Call, launch
from tests.metal import Counters, Outputs, metal_kernel, settings
from tests.metal.clang import unsupported
from tests.metal.registers import Registers

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SEEDS = (1, 2, 3)


def _kernel(call: Call) -> metal_kernel:
    return metal_kernel(
        call.kernel.name,
        list(call.kernel.input_names),
        list(call.kernel.output_names),
        call.kernel.source,
        header=call.kernel.header,
        in_place=call.in_place,
    )


def _arguments(call: Call) -> dict[str, Any]:
    return {
        "inputs": list(call.inputs),
        "template": list(call.template),
        "grid": call.grid,
        "threadgroup": call.threadgroup,
        "output_shapes": list(call.output_shapes),
        "output_dtypes": list(call.output_dtypes),
    }


class OnDevice(list[Any]):
    """What a Mac's GPU gave."""

    @property
    def counters(self) -> Counters:
        pytest.skip("counted on the emulator only")


def run(call: Call) -> Outputs | OnDevice:
    """Launches a call; on the emulator in three random orders of threads and threadgroups.

    There a finding raises, and every order must give the same bits.
    """
    if mx.metal.is_available():
        return OnDevice(launch(call))
    if reason := unsupported():
        pytest.skip(reason)
    written = [call.inputs[call.kernel.input_names.index(name)] for name in call.in_place]
    before = [a + 0 for a in written]
    mx.eval(before)
    first = once(call, SEEDS[0])
    expected = [*first, *(a + 0 for a in written)]
    mx.eval(expected)
    for seed in SEEDS[1:]:
        for a, value in zip(written, before, strict=True):
            a[...] = value
        found = [*once(call, seed), *written]
        assert all(_same(a, b) for a, b in zip(found, expected, strict=True)), f"seed {seed}"
    return first


def once(call: Call, seed: int) -> Outputs:
    """Launches a call on the emulator in one random order."""
    with settings.use(order="random", seed=seed):
        return _kernel(call)(**_arguments(call))


def _same(a: mx.array, b: mx.array) -> bool:
    """To the bit, and NaN is NaN."""
    return bool(mx.array_equal(a, b, equal_nan=True))


def registers(call: Call) -> Registers:
    """What another GPU's compiler needs for the kernel."""
    if mx.metal.is_available():
        pytest.skip("ranked beside the emulator only")
    return _kernel(call).registers(**_arguments(call))


@dataclass(frozen=True)
class Matrix:
    """A packed matrix (N, K) and its values in float64, unpacked here."""

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    group_size: int
    mode: str
    n: int
    k: int
    values: np.ndarray  # (N, K)


def numbers(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def pack(q: np.ndarray, bits: int) -> mx.array:
    """(N, K) small integers to words: one little-endian bit stream a row."""
    n, k = q.shape
    stream = (q[:, :, None] >> np.arange(bits)) & 1
    return mx.array(
        np.packbits(stream.reshape(n, k * bits).astype(np.uint8), axis=1, bitorder="little")
        .view("<u4")
        .astype(np.uint32)
    )


def matrix(
    n: int,
    k: int,
    bits: int = 4,
    group: int = 64,
    dtype: mx.Dtype = mx.float16,
    seed: int = 0,
) -> Matrix:
    """Random codes, scales and biases of the affine format."""
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 2**bits, (n, k))
    scales = normal(rng, (n, k // group), dtype) * (0.5 / 2**bits)
    biases = normal(rng, (n, k // group), dtype) * 0.25
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    # One float32 multiply, one float32 add: the contract's rounding of a weight.
    wide = [np.repeat(np.array(a.astype(mx.float32)), group, axis=1) for a in (scales, biases)]
    values = wide[0] * q.astype(np.float32) + wide[1]
    return Matrix(
        pack(q, bits), scales, biases, bits, group, "affine", n, k, values.astype(np.float64)
    )


def _e2m1(q: np.ndarray) -> np.ndarray:
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return np.where(q & 8, -1, 1) * table[q & 7]


def _e4m3(q: np.ndarray) -> np.ndarray:
    exponent, fraction = (q >> 3) & 15, (q & 7) / 8
    size = np.where(exponent, 2.0 ** (exponent - 7.0) * (1 + fraction), 2.0**-6 * fraction)
    return np.where(q & 128, -1, 1) * size


def micro(n: int, k: int, mode: str, seed: int = 0) -> Matrix:
    """Random codes and scales of a microscaling format; e4m3's NaN (0x7f) left out."""
    rng = np.random.default_rng(seed)
    bits, group = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}[mode]
    q = rng.integers(0, 2**bits, (n, k))
    if bits == 8:
        q = np.where(q & 127 == 127, 0, q)
    codes = _e4m3(q) if bits == 8 else _e2m1(q)
    if mode == "nvfp4":
        scales = rng.integers(1, 100, (n, k // group))
        factor = _e4m3(scales)
    else:
        scales = rng.integers(118, 130, (n, k // group))
        factor = 2.0 ** (scales - 127.0)
    values = codes * np.repeat(factor, group, axis=1)
    packed_scales = mx.array(scales.astype(np.uint8))
    return Matrix(pack(q, bits), packed_scales, None, bits, group, mode, n, k, values)


def round_to(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """float64 to dtype and back, through the float32 that kernels hold."""
    return numbers(mx.array(values.astype(np.float32)).astype(dtype))


def one_hot(columns: list[int], k: int, dtype: mx.Dtype) -> mx.array:
    x = np.zeros((len(columns), k), np.float32)
    x[np.arange(len(columns)), columns] = 1
    return mx.array(x).astype(dtype)


def ulp(value: np.ndarray | float, dtype: mx.Dtype) -> np.ndarray:
    """Distance of neighbours at value, those of subnormal numbers too."""
    fraction, least = {mx.float32: (23, -126), mx.float16: (10, -14), mx.bfloat16: (7, -126)}[dtype]
    exponent = np.floor(np.log2(np.maximum(np.abs(value), 2.0**least)))
    return 2.0 ** (exponent - fraction)


def assert_bounded(y: mx.array, reference: np.ndarray, plain: mx.array) -> None:
    """|y - ref64| <= 2 |plain op in the same dtype - ref64| + 1 ulp of max |ref|, as maxima."""
    assert y.dtype == plain.dtype
    assert y.shape == reference.shape
    error = np.abs(numbers(y) - reference).max()
    allowed = 2 * np.abs(numbers(plain) - reference).max() + ulp(np.abs(reference).max(), y.dtype)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


SAMPLE = 64  # rows of x whose errors in the plain op are the measure where a result has few numbers


def assert_product_bounded(y: mx.array, x: mx.array, values: np.ndarray) -> None:
    """The bound for y, the product of the first rows of x (SAMPLE, K) with values (N, K).

    A product of two or three numbers may be exact by luck, so the plain op is judged by all rows.
    """
    reference = numbers(x) @ values.T
    plain, rows = plain_product(x, values), y.shape[0]
    assert y.dtype == plain.dtype
    error = np.abs(numbers(y) - reference[:rows]).max()
    allowed = 2 * np.abs(numbers(plain) - reference).max() + ulp(
        np.abs(reference[:rows]).max(), y.dtype
    )
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def plain_product(x: mx.array, values: np.ndarray) -> mx.array:
    """x @ w.T with everything in x's dtype."""
    w = mx.array(values.astype(np.float32)).astype(x.dtype)
    return x @ w.T
