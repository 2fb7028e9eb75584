"""Safetensors files: checked headers with mapped bytes, and a writer that streams.

Layout: header length u64, a JSON header {name: {dtype, shape, data_offsets}}, the bytes.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from qrun.errors import CheckpointError

_BY_BYTES = {8: "F64 I64 U64", 4: "F32 I32 U32", 2: "F16 BF16 I16 U16", 1: "I8 U8 BOOL"}
ITEM_BYTES = {name: nbytes for nbytes, names in _BY_BYTES.items() for name in names.split()}
MAX_SHARD_BYTES = 5_000_000_000
_MAX_HEADER = 100_000_000  # the format's own limit
_ALIGN = 64  # tensors of whole cache lines then start on one


@dataclass(frozen=True)
class TensorView:
    """A tensor in a file: dtype by its safetensors name, bytes mapped."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]  # (bytes,)


def read_safetensors(path: Path) -> dict[str, TensorView]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(16)
        _refuse_lookalikes(path, head, size)
        (length,) = struct.unpack("<Q", head[:8])
        if length > min(size - 8, _MAX_HEADER):
            raise _damaged(path, f"its header claims {length} of {size} bytes")
        file.seek(8)
        raw = file.read(length)
    try:
        header: Any = json.loads(raw)
    except ValueError:
        raise _damaged(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no table")
    entries = {k: v for k, v in cast(dict[str, Any], header).items() if k != "__metadata__"}
    data: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")[8 + length :]
    return {name: _view(path, name, entry, data) for name, entry in entries.items()}


def _view(path: Path, name: str, entry: Any, data: npt.NDArray[np.uint8]) -> TensorView:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(d) for d in entry["shape"])
        first, last = (int(o) for o in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"the entry of {name} is malformed") from None
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name} has dtype {dtype}, which qrun does not read")
    nbytes = ITEM_BYTES[dtype]
    for d in shape:
        nbytes *= d
    if min(shape, default=0) < 0 or not 0 <= first <= last or last - first != nbytes:
        raise _damaged(path, f"the entry of {name} contradicts itself")
    if last > data.size:
        raise CheckpointError(
            f"{path}: truncated: tensor {name} ends at byte {last} of the data, "
            f"which has {data.size}",
            hint="download the file again",
        )
    return TensorView(dtype, shape, data[first:last])


def _refuse_lookalikes(path: Path, head: bytes, size: int) -> None:
    if head.startswith(b"version https://"):
        raise CheckpointError(
            f"{path}: a git-lfs pointer, not the weights", hint="run `git lfs pull` in its folder"
        )
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        raise CheckpointError(f"{path}: an HTML page, not weights", hint="download the file again")
    if size < 10:
        raise _damaged(path, f"only {size} bytes")


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: no valid safetensors file: {why}", hint="download the file again"
    )


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
            name = "model.safetensors" if one else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
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
        path = self.folder / "model.safetensors.index.json"
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
