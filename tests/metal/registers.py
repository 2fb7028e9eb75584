"""How many registers a kernel needs, ranked by another GPU's compiler.

Apple's compiler is not here, so no number of registers on Apple is known. But a kernel whose
accumulators do not fit on AMD's gfx11 will hardly fit there: both have 32 lanes a simdgroup,
a few hundred 32-bit registers a lane, and LLVM in front. So the same text is compiled by clang for
gfx1100, where collectives become single instructions with the same operands, and the counts are
read from the assembly. Compare designs by it; do not read it as a forecast.

Versions of clang differ by a few registers (19 and 22: by one or two in products, by up to an
eighth in attention). Numbers that stand anywhere are clang 19's; `slack` is what to allow another.
"""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import dataclass

from tests.metal.clang import METAL_FLAGS, NEEDED, CompileError, find_clang, version

FLAGS = ["--target=amdgcn-amd-amdhsa", "-mcpu=gfx1100", "-nogpulib", "-O2", "-DEM_REGISTERS"]
FLAGS += ["-mllvm", "-unroll-threshold=20000"]  # grids of fragments must leave memory
# As Metal does: one function (a call would bring an ABI's registers), fused multiply-adds, and
# loops of unknown length as they are written.
FLAGS += ["-mllvm", "-inline-threshold=1000000", "-mllvm", "-unroll-runtime=false"]
FLAGS += ["-ffp-contract=fast"]


@dataclass(frozen=True)
class Registers:
    vector: int  # 32-bit registers a lane
    spilled: int  # of those, kept in memory
    scalar: int  # shared by the simdgroup
    scratch: int  # bytes of memory a lane: spills and private arrays that stayed arrays


@functools.cache
def slack() -> float:
    """By what factor this machine's clang may rank higher than the one that numbers come from."""
    return 1.0 if version(find_clang()) == NEEDED else 1.125


@functools.lru_cache(maxsize=256)
def measure(source: str) -> Registers:
    """`source`: what kernel.py gives to clang, with the entry as an AMD kernel."""
    command = [*find_clang(), *METAL_FLAGS, *FLAGS, "-S", "-o", "-", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError("clang for gfx1100 refuses:\n" + done.stderr.strip())

    def number(pattern: str) -> int:
        found = re.search(pattern, done.stdout)
        if not found:
            raise CompileError(f"no `{pattern}` in the assembly")
        return int(found.group(1))

    return Registers(
        vector=number(r"\.vgpr_count:\s+(\d+)"),
        spilled=number(r"\.vgpr_spill_count:\s+(\d+)"),
        scalar=number(r"\.sgpr_count:\s+(\d+)"),
        scratch=number(r"\.private_segment_fixed_size:\s+(\d+)"),
    )
