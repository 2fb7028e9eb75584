"""Ranges of device memory, lent and given back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

ALIGNMENT = 256
ENDLESS = 1 << 62


class Room:
    """Free ranges. Whoever gives one back knows that the next to take it writes later.

    grow(size) finds a new range of at least that size -> (start, size). What is taken lies within
    one of them, even if two lie side by side.
    """

    def __init__(self, grow: Callable[[int], tuple[int, int]]) -> None:
        self._grow = grow
        self._free: list[tuple[int, int]] = []  # start, size; by start
        self._starts: set[int] = set()  # of what grow found

    def take(self, size: int) -> int:
        """The start of `size` bytes, a multiple of ALIGNMENT: from the smallest that holds them."""
        at, least = -1, ENDLESS + 1
        for i, (_, length) in enumerate(self._free):
            if size <= length < least:
                at, least = i, length
        if at >= 0:
            start, length = self._free.pop(at)
        else:
            start, length = self._grow(size)
            self._starts.add(start)
            at = bisect_left(self._free, (start, 0))
        if length > size:
            self._free.insert(at, (start + size, length - size))
        return start

    def give(self, start: int, size: int) -> None:
        """Back it goes, one with its free neighbours."""
        at = bisect_left(self._free, (start, 0))
        end = start + size
        if at < len(self._free) and self._free[at][0] == end and end not in self._starts:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == start and start not in self._starts:
            at -= 1
            start, before = self._free.pop(at)
            size += before
        self._free.insert(at, (start, size))


def aligned(size: int) -> int:
    """Up to a multiple of ALIGNMENT, and not nothing."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
