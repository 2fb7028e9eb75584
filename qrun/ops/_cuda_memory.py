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
        start = self.find(size)
        if start is not None:
            return start
        start, length = self._grow(size)
        self._starts.add(start)
        return self._cut(start, length, size)

    def find(self, size: int) -> int | None:
        """The same without growing."""
        fits = [(length, start) for start, length in self._free if length >= size]
        if not fits:
            return None
        length, start = min(fits)
        self._free.remove((start, length))
        return self._cut(start, length, size)

    def _cut(self, start: int, length: int, size: int) -> int:
        if length > size:
            self.give(start + size, length - size)
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


class Shelf:
    """A room in front of which ranges wait for somebody who asks for just their size: quick, and
    the steps of a prompt ask for the same sizes again and again.
    """

    def __init__(self, grow: Callable[[int], tuple[int, int]]) -> None:
        self._room = Room(grow)
        self._waiting: dict[int, list[int]] = {}  # starts by size

    def take(self, size: int) -> int:
        """As Room's; all of it is put together again before it grows."""
        waiting = self._waiting.get(size)
        if waiting:
            return waiting.pop()
        start = self._room.find(size)
        if start is not None:
            return start
        for length, starts in self._waiting.items():
            for each in starts:
                self._room.give(each, length)
        self._waiting.clear()
        return self._room.take(size)

    def give(self, start: int, size: int) -> None:
        """Back it goes."""
        waiting = self._waiting.get(size)
        if waiting is None:
            waiting = self._waiting[size] = []
        waiting.append(start)


def aligned(size: int) -> int:
    """Up to a multiple of ALIGNMENT, and not nothing."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
