"""How the CUDA products cut their work: tiles, and which of them for a shape. Measured on an H200;
kernels/qmv/README.md and kernels/qmm/README.md have the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from qrun.ops import _cuda_driver as driver
from qrun.ops._cuda_launch import ceil_div

SMS = 132  # of an H100 or H200: what the choices were measured with
STEP = 128  # codes of a row of w that a warp of qmv.cuh takes at a time
LONGEST = 1 << 16  # K of qmv.cuh: one row of x has to fit into shared memory
SHARED = 227 * 1024  # bytes of shared memory that the blocks of an SM share (sm_90)

# Clusters that run at a time, by how many blocks an SM holds and a cluster has: none spans two of
# the groups of 16 or 18 SMs that the chip is made of (cuOccupancyMaxActiveClusters on an H200).
CLUSTERS = {
    1: {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15},
    2: {1: 264, 2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 8: 30},
}


def multiprocessors() -> int:
    """Of this machine's GPU, for a grid that stays; without a GPU, an H200's."""
    return driver.multiprocessors() if mx.cuda.is_available() else SMS


def shared_memory() -> int:
    """What the blocks of an SM of this machine's GPU share, 1 KB of each besides."""
    return driver.shared_memory() - 1024 if mx.cuda.is_available() else SHARED


class QmvTile(NamedTuple):
    """Of qmv.cuh: rows of x of a block, steps of a take, warps of a team, teams, blocks that an SM
    shall hold; whether words are asked for step by step; whether w is dequantized for the tensor
    cores; blocks of a cluster, which share K.
    """

    rows: int
    take: int
    warps: int
    teams: int
    blocks: int
    ahead: bool = False
    dequantized: bool = False
    splits: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.teams

    def rounds(self, k: int) -> int:
        return ceil_div(k, STEP * self.take * self.warps * self.splits)

    def clusters(self, n: int) -> int:
        """Blocks, if they are no clusters."""
        most = CLUSTERS[1][self.splits] if self.splits > 1 else self.blocks * multiprocessors()
        return min(ceil_div(n, 16), most)

    def shared(self, n: int, k: int, group: int) -> int:
        """Bytes of shared memory, as qmv.cuh places it."""
        takes, parts = self.warps * self.rounds(k), STEP // group
        zeros = parts > 1 and not self.dequantized
        x = (takes + zeros) * self.take * self.rows * 256
        out = 20 if self.rows > 1 and (self.dequantized or group == STEP) else 16
        sums = self.teams * self.warps * (2 * out + 1)
        if not self.dequantized:
            sums += takes * self.take * parts
        if self.splits > 1:
            sums += ceil_div(ceil_div(n, 16), self.clusters(n)) * 16
        return x + sums * self.rows * 4

    @property
    def arguments(self) -> dict[str, int]:
        """The kernel's template arguments from TAKE on, but for the rounds."""
        return {
            "TAKE": self.take,
            "WARPS": self.warps,
            "TEAMS": self.teams,
            "AHEAD": self.ahead,
            "DEQUANTIZED": self.dequantized,
            "SPLITS": self.splits,
        }


@cache
def qmv_tile(
    rows: int,
    n: int,
    k: int,
    group: int,
    scale_bytes: int = 2,
    alike: bool = False,
    clusters: bool = False,
    norm: bool = False,
) -> QmvTile:
    """alike: scales are of x's type. clusters: a cluster may share K. norm: one stands in front.

    Up to 16 rows if `alike`.

    A tile of fewer rows than there are: x does not fit, several blocks read the same w.
    """
    room = shared_memory()
    if alike and rows > group // 16:
        for splits in (1, 2, 4, 8) if clusters else (1,):
            tile = _dequantized_tile(rows, n, k, splits)
            if tile.shared(n, k, group) <= room - 1024:
                return tile
    pairs = k // (4 * STEP)  # takes of two steps, of each half of K
    if alike and clusters and 2 < rows <= 4 and pairs >= 24 and k % (4 * STEP) == 0:
        warps = ceil_div(pairs, ceil_div(pairs, 16))
        tile = QmvTile(rows, 2, warps, 1, 1, pairs % warps == 0, splits=2)
        if tile.shared(n, k, group) <= room - 1024:
            return tile
    most = min(8, group // 8)  # two passes of the tensor cores: more want too many registers
    rows = ceil_div(rows, ceil_div(rows, most))
    while True:
        tile = _qmv_tile(rows, n, k, group, scale_bytes, norm and rows == 1)
        if tile.shared(n, k, group) <= room // tile.blocks - 1024:
            return tile
        rows = ceil_div(rows, 2)


def _dequantized_tile(rows: int, n: int, k: int, splits: int) -> QmvTile:
    """What 691 timings of 21 matrices with 4, 8 and 16 rows came down to (qmv-16-rows.txt)."""
    rows = 4 if rows <= 4 else 8 if rows <= 8 else 16  # few kernels to compile
    steps, tiles = ceil_div(ceil_div(k, STEP), splits), ceil_div(n, 16)
    even = k % (2 * STEP * splits) == 0
    take, most, teams = 2 if even else 1, 16, 1
    if splits == 1 and tiles > 3 * SMS:  # many: teams side by side, each warp with a good part of K
        if k % (4 * STEP) == 0 and steps >= 32 and tiles > 4 * SMS:
            take, most, teams = (4, 8, 2) if rows <= 8 else (4, 2, 7)
        else:
            takes = ceil_div(steps, take)
            most = min((w for w in (4, 5, 6, 7, 3) if takes % w == 0), default=5)
            teams = 4 if most <= 5 else 2
    elif splits == 1 and (rows > 8 or steps <= 16):
        take = 1
    takes = ceil_div(steps, take)
    warps = ceil_div(takes, ceil_div(takes, most))
    if splits == 1 and tiles <= 3 * SMS:  # a second team puts x in order sooner, if no more
        room = 24 if rows <= 8 < warps and tiles <= SMS else 16
        teams = max(1, room // warps)
    several = takes > warps or splits * tiles > teams * SMS
    ahead = several and k == STEP * splits * take * warps * ceil_div(takes, warps)
    return QmvTile(rows, take, warps, teams, 1, ahead, True, splits)


def _qmv_tile(rows: int, n: int, k: int, group: int, scale_bytes: int, norm: bool) -> QmvTile:
    """What 3,484 timings of 23 shapes with 1, 2, 4 and 8 rows came down to: 1 % behind the best
    tile on average, 13 % at worst; behind a norm, what whole decode steps said
    (kernels/qmv/WORKLOG.md).
    """
    steps, tiles = ceil_div(k, STEP), ceil_div(n, 16)
    few, many = tiles <= SMS, tiles > 4 * SMS
    slim = scale_bytes == 2 and group > 32  # factors leave registers for more than 16 warps an SM
    most = 28 if slim else 16
    # Takes of four steps where rows of w are long, or many; warps that share K evenly.
    if rows <= 2:
        long = 32 <= steps <= 64 or (many and steps >= 16)
    else:
        long = many and steps >= 32 and (rows <= 4 or slim)
    fours = ceil_div(steps, 4)
    norm = norm and slim
    if norm:  # more warps share it
        long = False
    if long and scale_bytes == 2 and k % (4 * STEP) == 0 and fours % ceil_div(fours, 16) == 0:
        take, widest = 4, 16
    else:
        take = 1 if k % (2 * STEP) or (few and rows > 2 and steps <= 16) else 2
        widest = 16 if rows <= 2 else most if steps > 64 else 10 if many else 16
    takes = ceil_div(steps, take)
    warps = ceil_div(takes, ceil_div(takes, widest))
    even = takes % warps == 0
    if few and steps <= 8:
        return QmvTile(rows, take, warps, 2, 1)  # the second team puts x in order sooner
    if few:
        return QmvTile(rows, take, warps, 1, max(1, min(4, 20 // warps)))
    # Teams side by side: as many as have a tile, if there is room for them.
    if take == 4:
        room = min(4, 16 // warps) if many or (2 * tiles <= 3 * SMS and warps <= 8) else 1
    elif warps >= 8:
        room = 2 if 2 * warps <= most and not (even and warps >= 12) else 1
    else:
        room = min(4, most // warps)
    if norm and warps >= 8 and not many:
        room = 1
    beside = 2 if tiles <= 2 * SMS else 4
    if beside > room:
        beside = room if many else 1
    # Where a team has several tiles, the words of the next follow step by step, if registers last.
    several = tiles > (2 * beside if beside > 1 else 1) * SMS
    ahead = several and even and slim and take > 1 and rows <= 4 and (take < 4 or beside == 1)
    # Few rows: blocks in place of teams, each with an x of its own.
    apart = rows <= 2 and warps <= (12 if norm else 8) and warps * take >= 8 * rows
    teams, blocks = (1, beside) if apart else (beside, 1)
    return QmvTile(rows, take, warps, teams, blocks, ahead)


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
        count = min(4, shared_memory() // stage)
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
        """A cluster's sums take the stages' place; the place begins at a multiple of 1024."""
        stages = self.stages * (self.bm * 256 + 16)
        return max(stages, self.bm * self.bn * 4 if self.splits > 1 else 0) + 1024

    def grid(self, rows: int, n: int, k: int) -> int:
        """Blocks. One stays and takes several tiles, if each has enough runs to fill the stages."""
        tiles = ceil_div(rows, self.bm) * ceil_div(n, self.bn)
        if self.splits == 1 and ceil_div(k, 128) >= self.stages:
            tiles = min(tiles, self.blocks * multiprocessors())
        return tiles * self.splits


# What full SMs reach with a tile, TFLOP/s, as `_microseconds` is fitted with.
WGMMA_TILES = {
    WgmmaTile(16, 2, 8, 2, 3): 130,
    WgmmaTile(32, 2, 6, 2, 3): 294,
    WgmmaTile(64, 2, 6, 1, 3): 400,
    WgmmaTile(64, 3, 6, 1, 3): 465,
    WgmmaTile(64, 4, 6, 1, 3): 475,
    WgmmaTile(128, 2, 6, 1, 3): 614,
    WgmmaTile(128, 3, 6, 1, 2): 651,
    WgmmaTile(128, 4, 6, 1, 1): 679,
    WgmmaTile(256, 2, 3, 1, 1): 743,
}


@cache
def wgmma_tile(rows: int, n: int, k: int) -> WgmmaTile:
    """The quickest by an estimate, among the kinds that were timed."""

    def candidates() -> Iterator[WgmmaTile]:
        for tile in WGMMA_TILES:
            across, along = ceil_div(rows, tile.bm), ceil_div(n, tile.bn)
            if across > 8 and tile.bm < 128:
                continue  # w would come from L2 more than eight times
            if 16 < tile.bm >= 2 * rows:
                continue  # a smaller one holds them all
            yield tile
            # Every split has two runs, and all clusters run at once: a second wave took twice as
            # long. Clusters of seven were behind those of six wherever they came out ahead here.
            for splits, most in CLUSTERS[tile.blocks].items():
                if 1 < splits <= ceil_div(k, 256) and across * along <= most:
                    yield tile._replace(splits=splits)

    return min(candidates(), key=lambda tile: _microseconds(tile, rows, n, k))


def _microseconds(tile: WgmmaTile, rows: int, n: int, k: int) -> float:
    """Of a launch, but for what all have alike. Its numbers are fitted to 1,638 timings of nine
    matrices with 20 to 2,048 rows; what is chosen by them is 0.5 % behind the best tile there is
    on average, at most 15 %.
    """
    rate = WGMMA_TILES[tile._replace(splits=1)] * 1e6 / SMS  # flops a microsecond and SM
    run = tile.blocks * tile.bm * tile.bn * 2 * 128 / rate
    tiles = ceil_div(rows, tile.bm) * ceil_div(n, tile.bn)
    waves = ceil_div(tiles, CLUSTERS[tile.blocks][tile.splits])
    sums = 0.9 + tile.bm * tile.bn * 4 / 33e3 if tile.splits > 1 else 0  # through the cluster
    return waves * ceil_div(ceil_div(k, 128), tile.splits) * run + sums


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
