"""How the CUDA products cut their work: tiles, and which of them for a shape. Measured on an H200;
kernels/qmv/README.md and kernels/qmm/README.md have the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from qrun.ops._cuda_launch import ceil_div

SMS = 132  # of an H100 or H200; elsewhere the grid only fits less well
SHARED = 227 * 1024  # bytes of shared memory that the blocks of an SM share (sm_90)


class QmvTile(NamedTuple):
    """Of qmv.cuh: rows of x of a block, words a lane holds of a step, steps of a take, warps, and
    blocks that an SM shall hold.
    """

    rows: int
    words: int
    take: int
    warps: int
    blocks: int

    def rounds(self, k: int) -> int:
        return ceil_div(k, 32 * self.words * self.take * self.warps)

    def shared(self, k: int, group: int) -> int:
        """Bytes of shared memory: `SHARED` of the kernel."""
        takes, parts = self.warps * self.rounds(k), 32 * self.words // group
        x = (takes + 1) * self.take * self.words * self.rows * 64
        sums = takes * self.take * parts + 2 * self.warps * 16 + self.warps
        return x + sums * self.rows * 4


@cache
def qmv_tile(rows: int, n: int, k: int, group: int, scale_bytes: int = 2) -> QmvTile:
    """About 16 warps an SM with 8 loads under way each, takes dealt out evenly: the best of 460
    timings (kernels/qmv/README.md).
    """
    rows = ceil_div(rows, ceil_div(rows, 8))
    while True:
        tile = _qmv_tile(rows, n, k, group, scale_bytes)
        if tile.shared(k, group) <= SHARED // tile.blocks - 1024:
            return tile
        rows = ceil_div(rows, 2)  # x does not fit: several blocks read the same w


def _qmv_tile(rows: int, n: int, k: int, group: int, scale_bytes: int) -> QmvTile:
    # A load of 16 bytes spans two groups of 64, which costs half of the columns of x.
    words = 2 if rows > group // 16 and group < 128 else 4
    steps, step = ceil_div(k, 32 * words), 32 * words
    most = 4 if (steps >= 64 if words == 2 else _long(steps, n)) else 2
    if scale_bytes == 4:  # factors take as many registers as codes
        most = 2
    take = next(t for t in (4, 2, 1) if t <= most and (t == 1 or k % (step * t) == 0))
    takes = ceil_div(steps, take)
    widest = 28 if words == 4 and rows > 2 else 16
    warps = ceil_div(takes, ceil_div(takes, widest))
    blocks = max(1, min(4, 16 // warps))
    if words == 4 and rows <= 2 and takes > warps:
        blocks = 2
    return QmvTile(rows, words, take, warps, blocks)


def _long(steps: int, n: int) -> bool:
    """Whether takes of four steps leave enough of them, and not too many."""
    return 32 <= steps <= 64 or (steps >= 16 and n >= 8192)


class MmaTile(NamedTuple):
    """Warps of a block of qmm_mma.cuh over n, m and k, each with 32 rows of w and tm rows of x."""

    tm: int
    wn: int
    wm: int
    wk: int

    @property
    def bm(self) -> int:
        return self.tm * self.wm

    @property
    def bn(self) -> int:
        return 32 * self.wn

    def stages(self, group: int) -> tuple[int, int]:
        """How many fit (four at most), and the bytes of shared memory."""
        units = 64 // min(group, 64)
        stage = self.wk * (self.bm * 128 + self.bn * 32 + units * self.bm * 4)
        count = min(4, SHARED // stage)
        # The sums at the end take the stages' place.
        return count, max(count * stage, self.wk * self.bm * (self.bn + 4) * 4)


class WgmmaTile(NamedTuple):
    """Of qmm_wgmma.cuh: rows of x of a block; its warpgroups, each with 64 rows of w; runs of x
    under way; blocks that an SM shall hold; runs of w under way; blocks of a cluster, which share
    the runs of a tile.
    """

    bm: int
    wn: int
    stages: int
    blocks: int
    ahead: int = 1
    splits: int = 1

    @property
    def bn(self) -> int:
        return 64 * self.wn

    @property
    def shared(self) -> int:
        """The sums at the end take the stages' place; the place begins at a multiple of 1024."""
        stages = self.stages * self.bm * 256
        return max(stages + 16 * self.stages, self.bm * (self.bn + 4) * 4) + 1024


# What full SMs reach with a tile, TFLOP/s (kernels/qmm/README.md).
WGMMA_TILES = {
    WgmmaTile(16, 2, 8, 2, 3): 160,
    WgmmaTile(32, 2, 6, 2, 3): 300,
    WgmmaTile(64, 2, 6, 1, 3): 370,
    WgmmaTile(64, 3, 6, 1, 3): 455,
    WgmmaTile(64, 4, 6, 1, 3): 510,
    WgmmaTile(128, 2, 6, 1, 3): 580,
    WgmmaTile(128, 3, 6, 1, 2): 610,
    WgmmaTile(128, 4, 6, 1, 1): 680,
    WgmmaTile(256, 2, 3, 1, 1): 700,
}

# Clusters that run at a time, by how many blocks an SM holds and a cluster has: none spans two of
# the groups of 16 or 18 SMs that the chip is made of (cuOccupancyMaxActiveClusters on an H200).
CLUSTERS = {
    1: {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15},
    2: {1: 264, 2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 7: 32, 8: 30},
}


@cache
def wgmma_tile(rows: int, n: int, k: int) -> WgmmaTile:
    """The quickest by an estimate, among the kinds that were timed."""

    def candidates() -> Iterator[WgmmaTile]:
        for tile in WGMMA_TILES:
            across, along = ceil_div(rows, tile.bm), ceil_div(n, tile.bn)
            if across > 8 and tile.bm < 128:
                continue  # w would come from L2 more than eight times
            yield tile
            # Every split has two runs, and all clusters run at once: a second wave took twice as
            # long.
            for splits, most in CLUSTERS[tile.blocks].items():
                if 1 < splits <= ceil_div(k, 256) and across * along <= most:
                    yield tile._replace(splits=splits)

    return min(candidates(), key=lambda tile: _microseconds(tile, rows, n, k))


def _microseconds(tile: WgmmaTile, rows: int, n: int, k: int) -> float:
    """Of a launch, but for what all have alike. Its numbers are fitted to 616 timings of 30 shapes;
    what is chosen by them is within 6 % of the best tile there is, on average within 1 %.
    """
    rate = WGMMA_TILES[tile._replace(splits=1)] * 1e6 / SMS  # flops a microsecond and SM
    run = tile.blocks * tile.bm * tile.bn * 2 * 128 / rate
    tiles = ceil_div(rows, tile.bm) * ceil_div(n, tile.bn)
    waves = ceil_div(tiles, CLUSTERS[tile.blocks][tile.splits])
    sums = 1 + tile.bm * tile.bn * 4 / 30e3 if tile.splits > 1 else 0  # through the cluster
    return waves * (ceil_div(ceil_div(k, 128), tile.splits) * run + 0.5) + sums


def mma_tile(rows: int, n: int, group: int) -> MmaTile:
    """Few rows: narrow tiles, many blocks, warps that split K. Many: the widest tile.

    Groups of 32 need twice the factors in registers, so a warp takes half the rows of x.
    """
    widest = 32 if group == 32 else 64
    if rows <= 64:
        wide = n >= 32 * 4 * 132
        tm = min(widest, 16 if rows <= 16 else 32 if rows <= 32 else 64)
        wm = 2 if tm < 64 and rows > 32 else 1
        return MmaTile(tm, 4 if wide else 1, wm, (2 if wide else 8) // wm)
    return MmaTile(widest, 4, 2, 1)
