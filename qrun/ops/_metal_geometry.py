"""Tile sizes of the Metal kernels, per chip family: what is used where nothing has been timed.

No entry has met its chip yet: each is reasoned from registers (128 of 32 bits a thread at most),
threadgroup memory (32 KiB a threadgroup) and fragment loads per multiply, as kernels/qmm/README.md
counts them. `_metal_tune` times the neighbours of an entry, and its choice wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import mlx.core as mx

THREADGROUP_BYTES = 32768  # of memory, all that a threadgroup can have


class Tile(NamedTuple):
    """A rung of the register-blocking ladder, for qmm and gemm."""

    bm: int  # rows of y a threadgroup owns
    bn: int  # columns of y a threadgroup owns
    bk: int  # step along K
    wm: int  # simdgroups along bm
    wn: int  # simdgroups along bn
    stages: int  # 1: single-buffered, 2: double-buffered

    @property
    def threads(self) -> int:
        return 32 * self.wm * self.wn

    @property
    def grid(self) -> tuple[int, int]:
        """Fragments of 8x8 that a simdgroup keeps in registers, along M and N."""
        return self.bm // (8 * self.wm), self.bn // (8 * self.wn)

    def threadgroup_bytes(self, x_bytes: int, w_bytes: int = 4) -> int:
        """Tiles of x and w, each row padded by 16 bytes."""
        x = self.bm * (self.bk * x_bytes + 16)
        w = self.bn * (self.bk * w_bytes + 16)
        return self.stages * (x + w)


class Rows(NamedTuple):
    """How qmv spreads a product over lanes: one or two rows of x."""

    rows: int  # of w that a simdgroup serves together
    run: int  # weights a lane takes at a time
    simdgroups: int  # in a threadgroup
    split: int  # simdgroups that share K


class Wide(NamedTuple):
    """How qmv spreads a product over fragments: up to 16 rows of x."""

    tm: int  # fragments of 8 rows of x
    tn: int  # fragments of 8 rows of w that a simdgroup serves together
    run: int  # weights a lane takes at a time
    simdgroups: int  # in a threadgroup
    split: int  # simdgroups that share K


# The ladder, bottom to top. 8x8 is not on it: 128 floats of accumulators are all the registers.
LADDER = {
    "1x1": Tile(16, 16, 32, 2, 2, 1),
    "2x2": Tile(32, 32, 32, 2, 2, 1),
    "4x2": Tile(64, 32, 32, 2, 2, 1),
    "4x4": Tile(64, 64, 32, 2, 2, 1),
    "4x4 double": Tile(64, 64, 32, 2, 2, 2),
}


@dataclass(frozen=True)
class Family:
    wide: Tile  # M > 32, 16-bit x
    wide_float: Tile  # M > 32, float32 x
    simdgroups: int  # that must be in flight to keep memory busy: qmv splits K to reach it
    matrix_units: bool = False  # MLX's own products reach them, simdgroup matrices do not


FAMILIES = {
    # Registers are handed out for the whole kernel: 4x4 (ranked 86) leaves room for several
    # threadgroups a core, so another one's work covers a barrier and one pair of tiles does.
    # With float32 x, 4x4 ranks at 106 and takes 18 KiB: 4x2 (84, 14 KiB) keeps more of them.
    "M1": Family(LADDER["4x4"], LADDER["4x2"], 1024),
    # As M1 with more cores and bandwidth.
    "M2": Family(LADDER["4x4"], LADDER["4x2"], 1536),
    # Registers and threadgroup memory come from one pool, on demand: occupancy follows what is
    # live, and the second pair of tiles would eat what the accumulators need.
    "M3": Family(LADDER["4x4"], LADDER["4x4"], 1536),
    "M4": Family(LADDER["4x4"], LADDER["4x4"], 1536),
    # Published on an M5 Max: double-buffered is 3x faster at 1024 squared, equal from 4096. The
    # float32 pair of tiles does not fit 32 KiB twice. Unmeasured, many rows go to MLX here.
    "M5": Family(LADDER["4x4 double"], LADDER["4x4"], 2048, matrix_units=True),
}


def family(device_name: str) -> Family:
    """The entry for a device such as "Apple M3 Max"; an unknown one gets the newest."""
    match = re.search(r"\bM(\d+)\b", device_name)
    newest = max(FAMILIES, key=lambda name: int(name[1:]))
    return FAMILIES.get(f"M{match[1]}" if match else newest, FAMILIES[newest])


@cache
def here() -> Family:
    """The entry for this machine; without a Metal device, the newest."""
    return family(str(mx.device_info()["device_name"]) if mx.metal.is_available() else "")


def tile(chip: Family, m: int, x_bytes: int) -> Tile:
    """qmm and gemm: rows of y beyond M are computed in vain, so a short M takes a low tile."""
    if m <= 16:
        return Tile(16, 64, 32, 1, 4, 1)  # 2x2: M padded to 16 at most, four simdgroups along N
    if m <= 32:
        return Tile(32, 64, 32, 1, 4, 1)  # 4x2
    return chip.wide if x_bytes == 2 else chip.wide_float


MAX_ROWS = 16  # of x that qmv serves


def qmv(chip: Family, m: int, n: int, k: int, bits: int) -> Rows | Wide:
    """Sums in lanes as long as they fit the registers, else in fragments: kernels/qmv/README.md."""
    run = 32 if bits in (3, 5) else 16  # whole words: 32 weights of 3 or 5 bits, else 4 to 16 bytes
    if m > (1 if run == 32 else 2):
        split = _split(chip, n // 16, k // (8 * run))
        return Wide(_ceil(m, 8), 2, run, max(2, split), split)
    if bits in (4, 8) and (m == 2 or k < 1024):
        run = 8  # a short K leaves fewer lanes idle
    count = 4 if m * run <= 16 else 2
    split = _split(chip, n // count, k // (32 * run))
    return Rows(count, run, max(2, split), split)


def _split(chip: Family, simdgroups: int, steps: int) -> int:
    """Short N: more simdgroups share K, as long as each has a step of it."""
    split = 1
    while split < 8 and simdgroups * split < chip.simdgroups and split * 2 <= steps:
        split *= 2
    return split


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


class Attention(NamedTuple):
    simdgroups: int
    bk: int  # keys a tile (prefill)


NORM_THREADS = 512  # more make the barrier dearer than the loads they add
DECODE_SIMDGROUPS = 8  # of sdpa's decode kernel: 256 threads leave each 100 registers and more


def decode_queries(head_dim: int) -> int:
    """Queries served together: each takes head_dim / 32 registers for q and as many for its sum."""
    return 8 if head_dim <= 128 else 4


def decode_splits(capacity: int) -> int:
    """Threadgroups that share one context: each has some 512 keys, 64 for each of 8 simdgroups."""
    splits = 1
    while splits < 32 and splits * 512 < capacity:
        splits *= 2
    return splits


def prefill(head_dim: int, x_bytes: int) -> Attention:
    """Tiles of 4 KiB of keys: what a thread holds of the next tile stays at 16 registers."""
    row = head_dim * x_bytes
    bk = 32 if row <= 128 else 16 if row <= 256 else 8
    simdgroups = 4
    while (8 * simdgroups + bk) * (row + 16) > THREADGROUP_BYTES:
        simdgroups //= 2
        if not simdgroups:
            raise ValueError(f"head_dim {head_dim}: its tiles do not fit 32 KiB")
    return Attention(simdgroups, bk)
