"""What a launch found wrong, in words, with source lines."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tests.metal.lines import LineTable

KINDS = [  # the order of the runtime's enum
    "race",
    "uninitialised read",
    "out of bounds",
    "misaligned",
    "write to input",
    "divergent",
    "threadgroup memory",
    "wild access",
    "division by zero",
    "inactive lane",
    "array index",
    "endless",
]
NOBODY = 0xFFFFFFFF


class MetalError(AssertionError):
    """A launch with findings; `.report` has them."""

    def __init__(self, name: str, report: list[Finding]) -> None:
        super().__init__("\n".join([f"{name}: {len(report)} finding(s)", *map(str, report)]))
        self.report = report


@dataclass(frozen=True)
class Finding:
    kind: str  # one of KINDS, or "unwritten output"
    where: str  # "file:line"
    message: str
    buffer: str = ""  # name of the input, output or threadgroup array
    offset: int = 0  # bytes from its start
    other: str = ""  # "file:line" of the other side, when known
    count: int = 1  # how often it came up

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"  {self.where}: {self.kind}: {self.message}{times}"


class RawFinding(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("pc", ctypes.c_uint64),
        ("pc2", ctypes.c_uint64),
        ("site", ctypes.c_uint64),
        ("site2", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("buffer", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("thread2", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("detail", ctypes.c_uint32),
    ]


def _thread(t: int) -> str:
    return "another thread" if t == NOBODY else f"thread {t} (simdgroup {t // 32}, lane {t % 32})"


def explain(raw: RawFinding, lines: LineTable, buffers: dict[int, tuple[str, int]]) -> Finding:
    """buffers: index -> (name, bytes)."""

    def line(pc: int) -> str:  # a return address: the call is before it
        return lines.find(pc - 1) if pc else ""

    def place(site: int) -> str:
        if not site:
            return ""
        return f"{lines.text_at(site >> 32)}:{(site & 0xFFFFFFFF) >> 10}"

    name, size = buffers.get(raw.buffer, ("", 0))
    where, other = line(raw.pc), line(raw.pc2)
    me, you = _thread(raw.thread), _thread(raw.thread2)
    at = f"{name} at byte {raw.offset}, {raw.size} bytes wide"
    kind = KINDS[raw.kind]
    act = ["read", "write", "atomic"][raw.detail] if raw.detail < 3 else ""
    if kind == "race":
        pair = ["write after write", "read after write", "write after read"][raw.detail & 3]
        whose = "of another threadgroup" if raw.detail & 4 else "with no barrier between"
        came = f" at {other}" if other else ""
        text = f"{pair} by {me} and {you}{came} {whose}: {at}"
    elif kind == "uninitialised read":
        text = f"{me} reads what nobody wrote: {at}"
    elif kind == "out of bounds":
        text = f"{act} of {at}; it has {size} bytes ({me}, threadgroup {raw.group})"
    elif kind == "misaligned":
        what = f"{name} at byte {raw.offset}" if name else "an address"
        text = f"{what} is no multiple of {raw.detail} ({me})"
    elif kind == "write to input":
        text = f"{act} of {at}: an input"
    elif kind == "threadgroup memory":
        text = f"{raw.detail} bytes with {name}; Metal has 32768"
    elif kind == "wild access":
        text = f"{act} of {raw.size} bytes at {raw.offset:#x}, in no buffer ({me})"
    elif kind == "division by zero":
        text = me
    elif kind == "inactive lane":
        text = f"{me} takes a value from lane {raw.detail}, which does not exist"
    elif kind == "endless":
        text = f"still running after {raw.detail} seconds of processor time ({me})"
    elif kind == "array index":
        text = f"index {raw.detail} ({me})"
    else:
        where, other = place(raw.site), place(raw.site2)
        text = [
            f"{me} comes here, {you} to {other}",
            f"{me} waits here, {you} has left the kernel",
            f"{me} took part here, {you} at {other or 'none'}",
            f"{me} waits here, {you} at {other}",
            "a simdgroup of fewer than 32 threads",
        ][raw.detail]
    return Finding(kind, where or "?", text, name, raw.offset, other, raw.count)
