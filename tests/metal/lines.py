"""From an address in a compiled kernel to its source line: a reader of DWARF 4's line table.

Kernels are compiled with -gdwarf-4 -gline-tables-only, so one small state machine is all that is
needed; no binutils, no llvm-symbolizer.
"""

from __future__ import annotations

import bisect
import struct
from pathlib import Path


def sections_of(image: bytes) -> dict[str, tuple[int, int, int]]:
    """name -> (address, file offset, size) of an ELF64 little-endian image."""
    (shoff,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", image, shoff + i * size) for i in range(count)]
    strings = rows[names][4]
    out = {}
    for name, _, _, address, offset, length in rows:
        end = image.index(b"\0", strings + name)
        out[image[strings + name : end].decode()] = (address, offset, length)
    return out


class Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 127) << shift
            shift += 7
            if not byte & 128:
                return value

    def sleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 127) << shift
            shift += 7
            if not byte & 128:
                return value - (1 << shift) if byte & 64 else value

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text


class LineTable:
    """`table.find(address)` -> "file:line", or "?" where there is no line."""

    def __init__(self, path: Path) -> None:
        self.image = path.read_bytes()
        self.sections = sections_of(self.image)
        rows: list[tuple[int, str, int]] = []
        if ".debug_line" in self.sections:
            _, at, size = self.sections[".debug_line"]
            end = at + size
            while at < end:
                at = self._unit(at, rows)
        rows.sort(key=lambda r: r[0])
        self.rows = rows
        self.addresses = [r[0] for r in rows]

    def find(self, address: int) -> str:
        i = bisect.bisect_right(self.addresses, address) - 1
        if i < 0:
            return "?"
        _, file, line = self.rows[i]
        return f"{file}:{line}" if line else file

    def text_at(self, address: int) -> str:
        """A C string in the image: the file names that collectives carry."""
        for start, offset, size in self.sections.values():
            if start and start <= address < start + size:
                at = offset + address - start
                return self.image[at : self.image.index(b"\0", at)].decode()
        return "?"

    def _unit(self, at: int, rows: list[tuple[int, str, int]]) -> int:
        r = Reader(self.image, at)
        end = r.take("I") + r.at
        version = r.take("H")
        header = r.take("I") + r.at
        if version > 4:  # the C library's start files, if any
            return end
        minimum = r.take("B")
        if version == 4:
            r.take("B")
        r.take("B")  # default_is_stmt
        base, span, first = r.take("b"), r.take("B"), r.take("B")
        lengths = [r.take("B") for _ in range(first - 1)]
        folders = [""]
        while folder := r.string():
            folders.append(folder + "/")
        files = [""]
        while name := r.string():
            files.append(folders[r.uleb()] + name)
            r.uleb()  # time
            r.uleb()  # size
        r.at = header
        while r.at < end:
            self._sequence(r, end, rows, files, (minimum, base, span, first), lengths)
        return end

    def _sequence(self, r, end, rows, files, shape, lengths) -> None:
        minimum, base, span, first = shape
        address, file, line = 0, 1, 1
        while r.at < end:
            op = r.take("B")
            if op >= first:
                address += (op - first) // span * minimum
                line += base + (op - first) % span
                rows.append((address, files[file], line))
            elif op == 0:
                length = r.uleb()
                after = r.at + length
                extended = r.take("B")
                if extended == 1:
                    rows.append((address, "?", 0))
                    r.at = after
                    return
                if extended == 2:
                    address = r.take("Q")
                r.at = after
            elif op == 1:
                rows.append((address, files[file], line))
            elif op == 2:
                address += r.uleb() * minimum
            elif op == 3:
                line += r.sleb()
            elif op == 4:
                file = r.uleb()
            elif op == 8:
                address += (255 - first) // span * minimum
            elif op == 9:
                address += r.take("H")
            else:
                for _ in range(lengths[op - 1]):
                    r.uleb()
