"""A kernel's shared object: how it is made, launched, and asked what it saw."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.metal import clang, inlining, rewrite
from tests.metal import signature as sig
from tests.metal.lines import LineTable
from tests.metal.lint import lint
from tests.metal.report import Finding, RawFinding, explain

ORDERS = {"forward": 0, "backward": 1, "random": 2}


class _RawBuffer(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("shadow", ctypes.c_void_p),
        ("reads", ctypes.c_void_p),
        ("by_width", ctypes.c_uint64 * 10),  # reads of 1, 2, 4, 8, 16 bytes, then writes
        ("atomics", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class BufferCount:
    """Traffic of one buffer. `reads` and `writes`: width in bytes -> number of accesses."""

    kind: str  # "input", "output", "threadgroup", or "shape", "strides", "ndim"
    bytes: int
    reads: dict[int, int]
    writes: dict[int, int]
    atomics: int
    least_reads: int = 0  # of inputs: how often its least and its most read byte was read
    most_reads: int = 0

    @property
    def read_bytes(self) -> int:
        return sum(w * n for w, n in self.reads.items())

    @property
    def narrowest_read(self) -> int:
        return min(self.reads, default=0)

    @property
    def written_bytes(self) -> int:
        return sum(w * n for w, n in self.writes.items())


@dataclass(frozen=True)
class Counters:
    buffers: dict[str, BufferCount]
    threadgroup_bytes: int
    barriers: int  # threadgroup barriers, all threadgroups together
    simd_barriers: int
    exchanges: int  # shuffles, reductions, votes, multiplies: once a simdgroup
    multiplies: int  # 8x8x8, once a simdgroup
    fragment_loads: int
    fragment_stores: int
    threadgroups: int
    threads: int

    @property
    def multiplies_per_load(self) -> float:
        """Of simdgroup_load; fragments filled through thread_elements are no loads."""
        return self.multiplies / self.fragment_loads if self.fragment_loads else 0.0

    @property
    def threadgroup_bytes_per_multiply(self) -> float:
        """Bytes read from threadgroup memory for each 8x8x8 product, however they were read."""
        read = sum(b.read_bytes for b in self.buffers.values() if b.kind == "threadgroup")
        return read / self.multiplies if self.multiplies else 0.0

    @property
    def barriers_per_threadgroup(self) -> float:
        return self.barriers / self.threadgroups


class Compiled:
    """A kernel's shared object, with the runtime in it."""

    def __init__(self, path: Path, array_names: list[str], literal: bool) -> None:
        self.path = path
        self.array_names = array_names
        self.literal = literal
        self.lib = ctypes.CDLL(str(path))
        self.lib.em_buffer.restype = ctypes.c_void_p
        self.lib.em_buffer.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p]
        self.lib.em_findings.restype = ctypes.POINTER(RawFinding)
        self.lib.em_buffers.restype = ctypes.POINTER(_RawBuffer)
        self.lib.em_stats.restype = ctypes.POINTER(ctypes.c_uint64 * 9)
        for name in ("em_unwritten", "em_threadgroup_bytes"):
            getattr(self.lib, name).restype = ctypes.c_uint64

        rows = inlining.chains(self.lines.image, self.lines.sections)
        self.chains = (ctypes.c_uint32 * (3 * len(rows) + 1))(*[n for row in rows for n in row])
        self.lib.em_chains(self.chains, len(rows))

    @functools.cached_property
    def lines(self) -> LineTable:
        return LineTable(self.path)

    def launch(
        self,
        args: Any,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        order: str,
        seed: int,
        seconds: int,
    ) -> None:
        three = ctypes.c_uint32 * 3
        self.lib.em_launch(
            self.lib.em_entry, args, three(*grid), three(*threadgroup), ORDERS[order],
            ctypes.c_uint64(seed), seconds, self.literal,
        )  # fmt: skip

    def findings(self, names: list[str]) -> list[Finding]:
        count = ctypes.c_uint32()
        raw = self.lib.em_findings(ctypes.byref(count))
        if not count.value:
            return []
        sizes = [b.size for b in self._raw_buffers()]
        named = {i: (n, sizes[i]) for i, n in enumerate(self._all_names(names))}
        return [explain(raw[i], self.lines, named) for i in range(count.value)]

    def counters(self, names: list[str], kinds: list[str]) -> Counters:
        found: dict[str, BufferCount] = {}
        widths = (1, 2, 4, 8, 16)
        raws = self._raw_buffers()
        for i, name in enumerate(self._all_names(names)):
            raw = raws[i]
            least, most = ctypes.c_uint32(), ctypes.c_uint32()
            if raw.reads:
                self.lib.em_read_range(i, ctypes.byref(least), ctypes.byref(most))
            found[name] = BufferCount(
                kind=kinds[i] if i < len(kinds) else "threadgroup",
                bytes=raw.size,
                reads={w: n for w, n in zip(widths, raw.by_width[:5], strict=True) if n},
                writes={w: n for w, n in zip(widths, raw.by_width[5:], strict=True) if n},
                atomics=raw.atomics,
                least_reads=least.value,
                most_reads=most.value,
            )
        stats = list(self.lib.em_stats().contents)
        return Counters(found, self.lib.em_threadgroup_bytes(), *stats[:8])

    def _raw_buffers(self) -> list[_RawBuffer]:
        count = ctypes.c_uint32()
        raw = self.lib.em_buffers(ctypes.byref(count))
        return [raw[i] for i in range(count.value)]

    def _all_names(self, names: list[str]) -> list[str]:
        """Of inputs and outputs, then of threadgroup arrays in the order of first use."""
        count = len(self._raw_buffers())
        every = names + [""] * (count - len(names))
        for array, name in enumerate(self.array_names):
            if index := self.lib.em_group_array_buffer(array):
                every[index - 1] = name
        return every


@functools.lru_cache(maxsize=256)
def lint_source(header: str, body: str) -> None:
    if found := lint(header, "header") + lint(body, "body"):
        raise clang.CompileError("the lint refuses:\n" + "\n".join(found))


def whole_text(
    parts: tuple[str, str, str, str], constants: tuple[tuple[int, Any], ...] = ()
) -> tuple[str, list[str]]:
    """(header, signature, body, entry) -> (what clang compiles, names of threadgroup arrays)."""
    header, signature, body, entry = parts
    rewriter = rewrite.Rewriter(constants=dict(constants))
    header = rewriter(header)
    body = rewriter(body)
    text = (
        f'#line 1 "prelude"\n{sig.PRELUDE}\n#line 1 "header"\n{header}\n'
        f'#line 1 "signature"\n{signature}\n#line 1 "body"\n{body}\n}}\n#line 1 "entry"\n{entry}'
    )
    return text, rewriter.arrays


@functools.lru_cache(maxsize=256)
def compile_parts(
    parts: tuple[str, str, str, str], constants: tuple[tuple[int, Any], ...], literal: bool
) -> Compiled:
    text, array_names = whole_text(parts, constants)
    return Compiled(clang.build(text, literal), array_names, literal)
