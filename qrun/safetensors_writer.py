"""Writing safetensors piece by piece: the headers first, then the tensors' bytes in any order."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qrun.checkpoint import INDEX, SINGLE

_BY_BYTES = {8: "F64 I64 U64", 4: "F32 I32 U32", 2: "F16 BF16 I16 U16", 1: "I8 U8 BOOL"}
ITEM_BYTES = {name: nbytes for nbytes, names in _BY_BYTES.items() for name in names.split()}
MAX_SHARD_BYTES = 5_000_000_000
_ALIGN = 64  # tensors of whole cache lines then start on one


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: known before its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]


class SafetensorsWriter:
    """Writes planned tensors into a folder piece by piece, in one file or in shards.

    Tensors of one group (a matrix, its scales, its biases) stay in one shard. The format allows
    no gaps, so within a file wider items come first: then every tensor lies at a multiple of its
    item size and can be used from the mapped file.
    """

    def __init__(self, folder: Path, groups: Sequence[Sequence[Planned]]) -> None:
        shards: list[list[Planned]] = [[]]
        filled = 0
        for group in groups:
            nbytes = sum(t.nbytes for t in group)
            if shards[-1] and filled + nbytes > MAX_SHARD_BYTES:
                shards.append([])
                filled = 0
            shards[-1].extend(group)
            filled += nbytes
        self.folder = folder
        self.total = sum(t.nbytes for shard in shards for t in shard)
        self.files: list[Path] = []
        self._open: list[io.FileIO] = []
        self._at: dict[str, tuple[io.FileIO, int]] = {}  # name: file, where its next bytes go
        for i, shard in enumerate(shards, 1):
            one = len(shards) == 1
            name = SINGLE if one else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            self._begin(folder / name, shard)
        if len(shards) > 1:
            self._write_index(shards)

    def _begin(self, path: Path, tensors: Sequence[Planned]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        at = 0
        for t in sorted(tensors, key=lambda t: -ITEM_BYTES[t.dtype]):
            offsets = [at, at + t.nbytes]
            header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": offsets}
            at += t.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        file = path.open("wb", buffering=0)  # pieces are large, and a close can then never fail
        self._open.append(file)
        self.files.append(path)
        _write_all(file, struct.pack("<Q", len(text)) + text)
        for t in tensors:
            self._at[t.name] = (file, 8 + len(text) + header[t.name]["data_offsets"][0])

    def _write_index(self, shards: Sequence[Sequence[Planned]]) -> None:
        where = {t.name: f.name for f, shard in zip(self.files, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
        path = self.folder / INDEX
        path.write_text(json.dumps(index, indent=4) + "\n", encoding="utf-8")

    def write(self, name: str, piece: npt.NDArray[Any]) -> None:
        """The next rows of a tensor; its pieces come in order, tensors in any order."""
        file, at = self._at[name]
        file.seek(at)
        _write_all(file, np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        self._at[name] = (file, at + piece.nbytes)

    def sync(self) -> None:
        for file in self._open:
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._open:
            file.close()


def _write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
