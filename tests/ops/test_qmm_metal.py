"""The Metal qmm, run by the emulator: decoding, sums, edges, traffic."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import _metal
from qrun.ops._metal_geometry import LADDER, Tile
from qrun.ops._metal_product import Behind, qmm_call
from qrun.paths import KERNELS
from tests.metal.registers import slack
from tests.ops import metal_support as support
from tests.ops.metal_support import DTYPES, run

SMALL = LADDER["1x1"]
ODD = Tile(16, 32, 32, 1, 2, 1)  # not square, to tell rows from columns


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_decode(bits: int, group: int) -> None:
    m = support.matrix(19, 128, bits, group)
    y = _metal.qmm(mx.eye(128), m, tile=ODD, run=run)
    np.testing.assert_array_equal(support.numbers(y), m.values.T)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_decode_micro(mode: str) -> None:
    m = support.micro(19, 64, mode)
    y = _metal.qmm(mx.eye(64), m, tile=ODD, run=run)
    np.testing.assert_array_equal(support.numbers(y), m.values.T)


@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_dtypes(dtype: mx.Dtype, scales: mx.Dtype) -> None:
    m = support.matrix(21, 64, 4, 32, scales)
    y = _metal.qmm(mx.eye(64).astype(dtype), m, tile=SMALL, run=run)
    assert y.dtype == dtype
    np.testing.assert_array_equal(support.numbers(y), support.round_to(m.values.T, dtype))


# The float32 tiles of the last rung are past 32 KiB twice: not in the geometry table either.
RUNGS = [
    (dtype, rung)
    for dtype in DTYPES
    for rung, tile in LADDER.items()
    if tile.threadgroup_bytes(dtype.size) <= 32768
]


@pytest.mark.parametrize(("dtype", "rung"), RUNGS)
def test_accumulation(dtype: mx.Dtype, rung: str) -> None:
    tile = LADDER[rung]
    m = support.matrix(70, 576)
    x = support.normal(np.random.default_rng(1), (67, 576), dtype)
    reference = support.numbers(x) @ m.values.T
    y = _metal.qmm(x, m, tile=tile, run=run)
    support.assert_bounded(y, reference, support.plain_product(x, m.values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 32), (3, 7, 96), (17, 33, 32), (9, 65, 896), (33, 2, 4864)]
)
def test_odd_shapes(shape: tuple[int, int, int], dtype: mx.Dtype) -> None:
    """Decode exact, accumulation bounded, nothing reported."""
    rows, n, k = shape
    m = support.matrix(n, k, 4, 32)
    rng = np.random.default_rng(2)
    x, columns = support.normal(rng, (support.SAMPLE, k), dtype), rng.integers(0, k, rows).tolist()
    y = _metal.qmm(x[:rows], m, tile=LADDER["2x2"], run=run)
    one = support.one_hot(columns, k, dtype)
    decoded = _metal.qmm(one, m, tile=LADDER["2x2"], run=run)
    support.assert_product_bounded(y, x, m.values)
    expected = support.round_to(m.values.T[columns], dtype)
    np.testing.assert_array_equal(support.numbers(decoded), expected)


@pytest.mark.parametrize("k", [96, 160])
def test_long_step(k: int) -> None:
    """A step of 64 along K that reaches past its end."""
    m = support.matrix(18, k, 4, 32)
    x = support.normal(np.random.default_rng(2), (20, k), mx.float16)
    y = _metal.qmm(x, m, tile=Tile(32, 32, 64, 2, 2, 1), run=run)
    reference = support.numbers(x) @ m.values.T
    support.assert_bounded(y, reference, support.plain_product(x, m.values))


def test_norm_in_front() -> None:
    rng = np.random.default_rng(4)
    m = support.matrix(24, 128)
    x, weight = support.normal(rng, (10, 128), mx.float32), support.normal(rng, (128,), mx.float32)
    y = _metal.qmm(x, m, norm=(weight, 1e-5), tile=SMALL, run=run)
    wide = support.numbers(x)
    normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * support.numbers(weight)
    np.testing.assert_allclose(support.numbers(y), normed @ m.values.T, atol=1e-4)


@pytest.mark.parametrize("bits", [3, 4])
def test_not_transposed(bits: int) -> None:
    """w packed along N: y = x @ w, K = 45 rows of N = 96 weights."""
    m = support.matrix(45, 96, bits, 32)
    x = support.normal(np.random.default_rng(5), (21, 48), mx.float32)
    (y,) = run(qmm_call(x[:, :45], m, Behind(), LADDER["2x2"], by_rows=False))
    reference = support.numbers(x)[:, :45] @ m.values
    np.testing.assert_allclose(support.numbers(y), reference, atol=1e-4)


TRAFFIC = [*((rung, 4) for rung in LADDER), *(("2x2", bits) for bits in (2, 3, 5, 6, 8))]


@pytest.mark.parametrize(("rung", "bits"), TRAFFIC)
def test_traffic(rung: str, bits: int) -> None:
    """w is read at most once a row of tiles, x once a column, in accesses of 4 bytes and more."""
    tile = LADDER[rung]
    m = support.matrix(130, 128, bits)
    x = support.normal(np.random.default_rng(6), (100, 128), mx.float16)
    outputs = run(qmm_call(x, m, Behind(), tile))
    w, read_x = outputs.counters.buffers["w"], outputs.counters.buffers["x"]
    assert w.read_bytes <= -(-100 // tile.bm) * w.bytes
    assert read_x.read_bytes <= -(-130 // tile.bn) * read_x.bytes
    assert min(w.reads) >= 4
    assert min(read_x.reads) >= 16


def test_ladder() -> None:
    """The README's table says what the emulator counts, for every rung and for 8x8."""
    m = support.matrix(256, 256)
    x = support.normal(np.random.default_rng(0), (128, 256), mx.float16)
    text = (KERNELS / "qmm" / "README.md").read_text()
    for rung, tile in (LADDER | {"8x8": Tile(128, 128, 32, 2, 2, 1)}).items():
        call = qmm_call(x, m, Behind(), tile)
        counters = run(call).counters
        half = support.registers(call)
        full = support.registers(qmm_call(x.astype(mx.float32), m, Behind(), tile))
        arrays = [counters.buffers[name] for name in ("x", "w", "scales", "biases", "y")]
        moved = sum(a.read_bytes + a.written_bytes for a in arrays)
        tm, tn = tile.grid
        loads = (tm + tn) / (tm * tn)  # a fragment of x is 128 bytes, one of w 256: counted below
        read = counters.buffers["tiles"].read_bytes / counters.multiplies
        assert read == (128 * tm + 256 * tn) / (tm * tn)
        assert half.vector > 2 * tm * tn  # the sums never leave them
        assert counters.threadgroup_bytes == tile.threadgroup_bytes(2)
        assert counters.multiplies == 128 * 256 * 256 // 512
        row = [
            rung,
            f"{tile.bm}x{tile.bn}x{tile.bk}, {tile.wm}x{tile.wn}",
            f"{2 * tm * tn}",
            r"(\d+) / (\d+)(?:, (\d+) spilled)?",
            f"{counters.threadgroup_bytes}",
            f"{loads:.2f}",
            f"{read:.0f}",
            f"{moved / (128 * 256):.2f}",
            f"{counters.barriers}",
        ]
        found = re.search(r"^\| " + r" \| ".join(row) + r" \| \S[^|]+ \|$", text, re.M)
        assert found, row
        told = [int(number or 0) for number in found.groups()]
        measured = [half.vector, full.vector, full.spilled]
        if slack() == 1:
            assert told == measured, rung
        assert [n > 0 for n in told] == [n > 0 for n in measured], rung
        assert all(n <= t * slack() for n, t in zip(measured[:2], told[:2], strict=True)), rung
