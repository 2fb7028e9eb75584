"""The choice of CUDA tiles: whatever the shape, the kernel bears the tile and the SM holds it."""

from __future__ import annotations

import pytest

from qrun.ops import _cuda_tiles as tiles
from qrun.ops._cuda_launch import ceil_div


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("scales", ["float32", "of 16 bits", "of x's type", "and clusters"])
def test_qmv_tiles_are_what_the_kernel_bears(group: int, scales: str) -> None:
    scale_bytes, clusters = 4 if scales == "float32" else 2, scales == "and clusters"
    alike = clusters or scales == "of x's type"
    lengths = [*range(group, 20 * group, group), 1024, 2048, 2560, 4096, 8192, 9728, 14336, 28672]
    for k in (*lengths, tiles.LONGEST - group, tiles.LONGEST):
        for n in (1, 16, 576, 2112, 2113, 3072, 4096, 6144, 8449, 28672, 151936):
            for rows, norm in [(1, True), *((m, False) for m in range(1, 17))]:
                tile = tiles.qmv_tile(rows, n, k, group, scale_bytes, alike, clusters, norm)
                steps = ceil_div(ceil_div(k, tiles.STEP), tile.splits)
                assert 1 <= tile.rows <= (16 if alike else min(rows, 8))
                assert 1 <= tile.warps <= ceil_div(steps, tile.take)
                assert tile.threads <= 1024
                assert tile.threads * tile.blocks <= 2048
                assert tile.blocks * (tile.shared(n, k, group) + 1024) <= tiles.SHARED
                if tile.take > 1:  # wide loads of factors, and no end of K within a take
                    assert k % (tiles.STEP * tile.take) == 0
                if tile.ahead:
                    takes = tile.splits * tile.warps * tile.rounds(k)
                    assert k == tiles.STEP * tile.take * takes
                if tile.dequantized:
                    assert alike
                else:
                    assert tile.rows <= 8
                if tile.splits > 1:
                    assert clusters


@pytest.mark.parametrize("n", [64, 1000, 4096, 28672, 151936])
@pytest.mark.parametrize("k", [128, 384, 1024, 4096, 14336])
def test_wgmma_tiles_fit_and_all_are_computed(n: int, k: int) -> None:
    for rows in (*range(9, 700, 13), 1024, 2048, 5000):
        tile = tiles.wgmma_tile(rows, n, k)
        assert tile.shared <= tiles.SHARED
        assert tile.blocks * (tile.shared + 1024) <= tiles.SHARED + 1024  # 1 KB each besides
        across, along = ceil_div(rows, tile.bm), ceil_div(n, tile.bn)
        blocks = tile.grid(rows, n, k)
        assert blocks % tile.splits == 0
        if blocks != across * along * tile.splits:  # a block has several tiles
            assert tile.splits == 1
            assert blocks == tile.blocks * tiles.multiprocessors() < across * along
            assert ceil_div(k, 128) >= tile.stages  # as the kernel wants then
