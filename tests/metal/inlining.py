"""Which calls were inlined around an address: a reader of DWARF 4's inlined subroutines.

A helper with a collective in it, called from both sides of a branch, is one source line but two
places. The chain of (file, line, column) of the inlined calls around an address tells them apart,
and stays the same when the optimizer copies one place (an unrolled loop).
"""

from __future__ import annotations

import struct
from typing import Any

from tests.metal.lines import Reader

INLINED, SUBPROGRAM = 0x1D, 0x2E
LOW, HIGH, RANGES, CALL_COLUMN, CALL_FILE, CALL_LINE = 0x11, 0x12, 0x55, 0x57, 0x58, 0x59
FIXED = {0x01: 8, 0x05: 2, 0x06: 4, 0x07: 8, 0x0B: 1, 0x0C: 1, 0x0E: 4, 0x11: 1, 0x12: 2, 0x13: 4}
FIXED |= {0x14: 8, 0x17: 4, 0x19: 0}  # form -> bytes


def _abbreviations(image: bytes, at: int) -> dict[int, tuple[int, bool, list[tuple[int, int]]]]:
    r, out = Reader(image, at), {}
    while code := r.uleb():
        tag, children, fields = r.uleb(), r.take("B") == 1, []
        while True:
            attribute, form = r.uleb(), r.uleb()
            if not attribute and not form:
                break
            fields.append((attribute, form))
        out[code] = (tag, children, fields)
    return out


def _value(r: Reader, form: int) -> int:
    if form == 0x08:
        r.string()
        return 0
    if form in (0x0D, 0x0F, 0x15):  # sdata, udata, ref_udata
        return r.sleb() if form == 0x0D else r.uleb()
    if form == 0x18:  # exprloc
        r.at += r.uleb()
        return 0
    size = FIXED[form]
    value = int.from_bytes(r.data[r.at : r.at + size], "little")
    r.at += size
    return value


def chains(image: bytes, sections: dict[str, tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(begin, end, chain) for every inlined call, by begin, outer before inner; chain is a hash."""
    if ".debug_info" not in sections:
        return []
    _, at, size = sections[".debug_info"]
    end, out = at + size, []
    while at < end:
        r = Reader(image, at)
        unit_end = r.take("I") + r.at
        if r.take("H") == 4:
            table = _abbreviations(image, sections[".debug_abbrev"][1] + r.take("I"))
            r.take("B")
            _unit(r, unit_end, table, sections, out)
        at = unit_end
    return sorted(out, key=lambda c: (c[0], -c[1]))


def _unit(r: Reader, end: int, table: Any, sections: Any, out: list) -> None:
    base, stack = 0, [0]  # stack: the chain of each open level
    while r.at < end:
        code = r.uleb()
        if code == 0:
            stack.pop()
            if not stack:
                return
            continue
        tag, children, fields = table[code]
        got = {attribute: (form, _value(r, form)) for attribute, form in fields}
        chain = stack[-1]
        if tag == 0x11:  # the unit itself
            base = got.get(LOW, (0, 0))[1]
        elif tag == SUBPROGRAM:
            chain = 0
        elif tag == INLINED:
            call = tuple(got.get(a, (0, 0))[1] for a in (CALL_FILE, CALL_LINE, CALL_COLUMN))
            chain = hash((chain, call)) & 0xFFFFFFFF
            for low, high in _extent(r.data, got, base, sections):
                out.append((low, high, chain))
        if children:
            stack.append(chain)


def _extent(image: bytes, got: dict, base: int, sections: Any) -> list[tuple[int, int]]:
    if RANGES in got:
        at, found = sections[".debug_ranges"][1] + got[RANGES][1], []
        while True:
            low, high = struct.unpack_from("<QQ", image, at)
            at += 16
            if low == 0 and high == 0:
                return found
            if low == 0xFFFFFFFFFFFFFFFF:
                base = high
            else:
                found.append((low + base, high + base))
    low = got.get(LOW, (0, 0))[1]
    form, high = got.get(HIGH, (0x01, 0))
    return [(low, high if form == 0x01 else low + high)] if high else []
