"""The Metal qmv, run by the emulator: decoding, sums, splits, norm, traffic."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import _metal
from qrun.ops import _metal_geometry as geometry
from qrun.ops._metal_geometry import Rows, Wide
from qrun.ops._metal_product import Behind, qmv_call
from tests.ops import metal_support as support
from tests.ops.metal_support import DTYPES, run

ALL_BITS = [2, 3, 4, 5, 6, 8]


LANES = Rows(4, 16, 2, 1)
FRAGMENTS = Wide(1, 2, 16, 2, 1)


def decoded(m: support.Matrix, rows: int) -> None:
    """One-hot rows, from both ends and all over K, give back columns of the matrix."""
    some = np.random.default_rng(m.bits).integers(0, m.k, (2, 10)).tolist()
    for columns in ([0, m.k - 1][:rows], *(c[:rows] for c in some)):
        y = _metal.qmv(support.one_hot(columns, m.k, mx.float32), m, run=run)
        np.testing.assert_array_equal(support.numbers(y), m.values.T[columns])


@pytest.mark.parametrize("rows", [1, 10])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_decode(bits: int, group: int, rows: int) -> None:
    decoded(support.matrix(11, 640, bits, group), rows)


@pytest.mark.parametrize("rows", [1, 10])
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_decode_micro(mode: str, rows: int) -> None:
    decoded(support.micro(11, 160, mode), rows)


@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_dtypes(dtype: mx.Dtype, scales: mx.Dtype) -> None:
    m = support.matrix(10, 96, 4, 32, scales)
    columns = [0, 1, 33, 95]
    y = _metal.qmv(support.one_hot(columns, 96, dtype), m, run=run)
    assert y.dtype == dtype
    expected = support.round_to(m.values.T[columns], dtype)
    np.testing.assert_array_equal(support.numbers(y), expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulation(dtype: mx.Dtype, rows: int) -> None:
    m = support.matrix(33, 576)
    x = support.normal(np.random.default_rng(rows), (rows, 576), dtype)
    reference = support.numbers(x) @ m.values.T
    y = _metal.qmv(x, m, run=run)
    support.assert_bounded(y, reference, support.plain_product(x, m.values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [LANES, FRAGMENTS])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 35])
@pytest.mark.parametrize("k", [32, 96, 896, 4864])
def test_odd_shapes(n: int, k: int, shape: Rows | Wide, dtype: mx.Dtype) -> None:
    """Decode exact, accumulation bounded, nothing reported."""
    m = support.matrix(n, k, 4, 32)
    x = support.normal(np.random.default_rng(n), (support.SAMPLE, k), dtype)
    columns = [k - 1, k // 3]
    y = _metal.qmv(x[:2], m, shape=shape, run=run)
    decoded = _metal.qmv(support.one_hot(columns, k, dtype), m, shape=shape, run=run)
    support.assert_product_bounded(y, x, m.values)
    expected = support.round_to(m.values.T[columns], dtype)
    np.testing.assert_array_equal(support.numbers(decoded), expected)


@pytest.mark.parametrize(
    "shape",
    [
        Rows(4, 16, 2, 2),
        Rows(2, 8, 8, 4),
        Rows(8, 8, 8, 8),
        Wide(1, 1, 16, 4, 2),
        Wide(2, 2, 32, 8, 8),
        Wide(1, 4, 8, 4, 4),
    ],
)
def test_split(shape: Rows | Wide) -> None:
    """Simdgroups that share K, some of them with nothing to read."""
    m = support.matrix(13, 1152)
    x = support.normal(np.random.default_rng(7), (2, 1152), mx.bfloat16)
    y = _metal.qmv(x, m, shape=shape, run=run)
    reference = support.numbers(x) @ m.values.T
    support.assert_bounded(y, reference, support.plain_product(x, m.values))


@pytest.mark.parametrize(
    "shape", [Rows(4, 32, 4, 1), Rows(4, 32, 4, 4), Wide(1, 2, 32, 4, 1), Wide(1, 2, 32, 4, 4)]
)
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_in_front(dtype: mx.Dtype, bits: int, shape: Rows | Wide) -> None:
    rng = np.random.default_rng(4)
    m = support.matrix(18, 704, bits)
    x = support.normal(rng, (3, 704), dtype) * 3
    weight = support.normal(rng, (704,), mx.float32)
    y = _metal.qmv(x, m, norm=(weight, 1e-5), shape=shape, run=run)
    wide = support.numbers(x)
    normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * support.numbers(weight)
    reference = normed @ m.values.T
    assert y.dtype == dtype
    error, most = np.abs(support.numbers(y) - reference).max(), np.abs(reference).max()
    assert error <= support.ulp(most, dtype) + 2.0**-21 * most  # and what float32 sums lose


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_traffic(bits: int, rows: int, split: int) -> None:
    """Every byte of w is read exactly once, in accesses of 4 bytes and more."""
    m = support.matrix(21, 896, bits)
    x = support.normal(np.random.default_rng(6), (rows, 896), mx.float16)
    length = 32 if bits in (3, 5) else 16
    tall = Wide(2 if rows > 8 else 1, 2, length, 4, split)
    for shape in (Rows(4, length, 4, split), tall) if rows <= 2 else (tall,):
        w = run(qmv_call(x, m, Behind(), None, shape)).counters.buffers["w"]
        assert w.read_bytes == w.bytes
        assert (w.least_reads, w.most_reads) == (1, 1)
        assert min(w.reads) >= 4


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
def test_traffic_of_what_the_table_chooses(rows: int) -> None:
    """In a layer: norm in front, gates behind, the geometry of every chip."""
    m = support.matrix(96, 576, 4, 32)
    x, norm = mx.ones((rows, 576), mx.float16), (mx.ones((576,), mx.float16), 1e-5)
    for chip in {geometry.qmv(f, rows, 96, 576, 4) for f in geometry.FAMILIES.values()}:
        call = qmv_call(x, m, Behind(activation="swiglu"), norm, chip)
        w = run(call).counters.buffers["w"]
        assert (w.least_reads, w.most_reads, w.read_bytes) == (1, 1, w.bytes)
        assert min(w.reads) >= 4
