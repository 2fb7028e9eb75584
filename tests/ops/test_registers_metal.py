"""What the geometry table ships stays below the cliff, as another GPU's compiler ranks it.

A thread of an Apple GPU has 128 registers of 32 bits at most. gfx11's counts are not Apple's; but a
kernel that needs more than 128 there (by clang 19: see tests/metal/registers.py) is none to choose
unmeasured.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from qrun.ops import _metal_geometry as geometry
from qrun.ops._metal_product import Behind, gemm_call, qmm_call, qmv_call
from qrun.ops._metal_rows import sdpa_decode_call, sdpa_prefill_call
from tests.metal.registers import slack
from tests.ops import metal_support as support

MOST = 128
M1 = geometry.FAMILIES["M1"]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_qmv(rows: int, bits: int) -> None:
    m = support.matrix(64, 2048, bits)
    x, norm = mx.zeros((rows, 2048), mx.float16), (mx.zeros((2048,), mx.float16), 1e-5)
    shape = geometry.qmv(M1, rows, 65536, 2048, bits)
    used = support.registers(qmv_call(x, m, Behind(activation="swiglu"), norm, shape))
    assert used.spilled == 0
    assert used.vector <= MOST * slack()


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("chip", ["M1", "M5"])
def test_tiles(chip: str, dtype: mx.Dtype, rows: int) -> None:
    tile = geometry.tile(geometry.FAMILIES[chip], rows, dtype.size)
    x, w = mx.zeros((rows, 256), dtype), mx.zeros((64, 256), dtype)
    for call in (
        qmm_call(x, support.matrix(64, 256), Behind(activation="swiglu"), tile),
        gemm_call(x, w, Behind(), tile),
    ):
        used = support.registers(call)
        assert used.spilled == 0
        assert used.vector <= MOST * slack()


def test_the_next_rung_is_past_the_cliff() -> None:
    tile = geometry.Tile(128, 128, 32, 2, 2, 1)
    assert tile.grid == (8, 8)
    x, m = mx.zeros((128, 256), mx.float32), support.matrix(128, 256)
    assert support.registers(qmm_call(x, m, Behind(), tile)).spilled > 0
    half = support.registers(qmm_call(x.astype(mx.float16), m, Behind(), tile))
    assert half.vector > 1.5 * MOST
    assert tile not in geometry.LADDER.values()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_attention(dim: int, dtype: mx.Dtype) -> None:
    q, cache = mx.zeros((1, 8, 40, dim), dtype), mx.zeros((1, 1, 64, dim), dtype)
    at = mx.array([0], mx.int32)
    for call in (
        sdpa_decode_call(q[:, :, :1], cache, cache, at, scale=0.125),
        sdpa_prefill_call(q, cache, cache, at, scale=0.125),
    ):
        used = support.registers(call)
        assert used.spilled == 0
        assert used.vector <= MOST * slack()
