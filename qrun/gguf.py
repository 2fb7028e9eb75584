"""A reader of the GGUF container: metadata, the tensor directory, and views of the mapped bytes.

Layout, all little-endian: magic "GGUF", version u32, tensor count u64, metadata count u64; the
metadata (key, type, value); the directory (name, dims, type, offset); padding up to `alignment`;
the tensors' bytes. Every count is checked against the bytes that are left before anything is
allocated, so that a damaged file costs one line and no memory.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qrun.config import refuse_non_files
from qrun.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]

# name of each tensor type: elements in a block, bytes of a block
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1"} | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NESTING = 4
_HINT = "download the file again, or ask its author for a GGUF of version 2 or 3"


@dataclass(frozen=True)
class Tensor:
    """One entry of the directory; `shape` runs from the slowest axis to the fastest (N, K)."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int  # first byte in the file
    nbytes: int


@dataclass(frozen=True)
class GGUF:
    """An opened file: its metadata as Python values, its tensors by name, its mapped bytes."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    data: Bytes  # (file size,) mapped, read-only
    others: dict[str, Bytes] = field(default_factory=dict[str, Bytes])  # of tensors in other parts

    def rows(self, name: str) -> Bytes:
        """The raw bytes of a matrix (N, bytes of a row); a vector (n,) comes as n rows of one."""
        t = self.tensors[name]
        count = t.shape[0] if len(t.shape) == 1 else int(np.prod(t.shape[:-1]))
        data = self.others.get(name, self.data)
        return data[t.start : t.start + t.nbytes].reshape(count, -1)


def is_gguf(path: Path) -> bool:
    """Whether the file is meant to be a GGUF: by its name or its first bytes."""
    if not path.exists() or path.is_dir():
        return False
    refuse_non_files(path)
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(4) == b"GGUF"


def open_gguf(path: Path) -> GGUF:
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path}: not a GGUF file: only {size} bytes", hint=_HINT)
    data: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
    cursor = _Cursor(path, data)
    _check_magic(path, data)
    cursor.at = 8
    tensor_count, metadata_count = cursor.unpack("<QQ", "the header")
    metadata: dict[str, Any] = {}
    cursor.check_count(metadata_count, 13, "metadata entries")
    for _ in range(metadata_count):
        key = cursor.string("a metadata key")
        (kind,) = cursor.unpack("<I", key)
        if key in metadata:
            raise CheckpointError(f"{path}: metadata {key!r:.80} occurs twice", hint=_HINT)
        metadata[key] = cursor.value(kind, key)
    cursor.check_count(tensor_count, 24, "tensors")
    found = [_read_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise CheckpointError(f"{path}: general.alignment {alignment!r} is no multiple of 8")
    start = -(-cursor.at // alignment) * alignment
    return GGUF(path, metadata, _place(path, found, start, alignment, size), data)


def open_parts(path: Path) -> GGUF:
    """A GGUF, or all parts of a split one; `path` is any of them. The first has the metadata."""
    given = open_gguf(path)
    count = given.metadata.get("split.count", 0)
    if count in (0, 1):
        return given
    name = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", path.name)
    if name is None or int(name[2]) != count:
        raise CheckpointError(
            f"{path}: one of {count} parts, but its name does not end in -of-{count:05}.gguf",
            hint="give the parts the names they were downloaded from",
        )
    paths = [path.with_name(f"{name[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {count} parts are missing: {', '.join(missing[:3])}",
            hint="download all parts into one folder",
        )
    parts = [open_gguf(p) for p in paths]
    tensors: dict[str, Tensor] = {}
    others: dict[str, Bytes] = {}
    for i, part in enumerate(parts):
        if part.metadata.get("split.no") != i or part.metadata.get("split.count") != count:
            raise CheckpointError(f"{part.path}: is not part {i + 1} of {count}", hint=_HINT)
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise CheckpointError(f"{part.path}: tensor {min(twice)} is in an earlier part too")
        tensors |= part.tensors
        others |= dict.fromkeys(part.tensors, part.data)
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(f"{path}: the parts have {len(tensors)} of {total} tensors")
    return GGUF(parts[0].path, parts[0].metadata, tensors, parts[0].data, others)


def _check_magic(path: Path, data: Bytes) -> None:
    head = data[:8].tobytes()
    if head[:4] != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file: it begins with {head[:4]!r}", hint=_HINT)
    (version,) = struct.unpack("<I", head[4:])
    if version in (2, 3):
        return
    (swapped,) = struct.unpack(">I", head[4:])
    if swapped in (2, 3):
        raise CheckpointError(f"{path}: a big-endian GGUF, which qrun does not read", hint=_HINT)
    raise CheckpointError(f"{path}: unknown GGUF version {version}", hint=_HINT)


def _read_tensor(cursor: _Cursor) -> Tensor:
    name = cursor.string("a tensor's name")
    (ndim,) = cursor.unpack("<I", name)
    if not 1 <= ndim <= _MAX_DIMS:
        raise CheckpointError(f"{cursor.path}: tensor {name}: {ndim} dimensions", hint=_HINT)
    dims: tuple[int, ...] = cursor.unpack(f"<{ndim}Q", name)
    kind, offset = cursor.unpack("<IQ", name)
    if kind not in TYPES:
        raise CheckpointError(
            f"{cursor.path}: tensor {name}: unknown tensor type {kind}",
            hint="ask for a GGUF in a common type (Q4_0, Q4_1, Q8_0, Q4_K_M, F16)",
        )
    type_name, block, block_bytes = TYPES[kind]
    if min(dims) == 0 or dims[0] % block:
        raise CheckpointError(f"{cursor.path}: tensor {name}: bad shape {dims} for {type_name}")
    nbytes = block_bytes
    for d in (dims[0] // block, *dims[1:]):
        nbytes *= d
    return Tensor(name, tuple(reversed(dims)), type_name, offset, nbytes)


def _place(
    path: Path, found: Sequence[Tensor], start: int, alignment: int, size: int
) -> dict[str, Tensor]:
    """Turn offsets within the data section into places in the file, all checked to lie in it."""
    tensors: dict[str, Tensor] = {}
    for t in found:
        first = start + t.start
        if t.name in tensors:
            raise CheckpointError(f"{path}: tensor {t.name} occurs twice", hint=_HINT)
        if t.start % alignment:
            raise CheckpointError(f"{path}: tensor {t.name}: offset {t.start} is not aligned")
        if first + t.nbytes > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {t.name} ends at byte {first + t.nbytes}, "
                f"the file at {size}",
                hint="download the file again",
            )
        tensors[t.name] = Tensor(t.name, t.shape, t.type, first, t.nbytes)
    return tensors


class _Cursor:
    """A place in the mapped header that never leaves the file."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path, self.view, self.at = path, data.data, 0

    def need(self, count: int, what: str) -> None:
        if count > len(self.view) - self.at:
            raise CheckpointError(
                f"{self.path}: truncated or damaged: {what:.80} ends past the end of the file",
                hint="download the file again",
            )

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        """A count of things of at least `least_bytes` each must fit into what is left."""
        if count * least_bytes > len(self.view) - self.at:
            raise CheckpointError(
                f"{self.path}: truncated or damaged: {count} {what} cannot fit in the file",
                hint="download the file again",
            )

    def unpack(self, fmt: str, what: str) -> tuple[Any, ...]:
        size = struct.calcsize(fmt)
        self.need(size, what)
        self.at += size
        return struct.unpack_from(fmt, self.view, self.at - size)

    def string(self, what: str) -> str:
        (length,) = self.unpack("<Q", what)
        self.need(length, what)
        self.at += length
        try:
            return str(self.view[self.at - length : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path}: {what:.80} is not valid UTF-8: {error}", hint=_HINT
            ) from None

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalars(kind, 1, key)[0].item()
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY or depth == _MAX_NESTING:
            raise CheckpointError(
                f"{self.path}: metadata {key!r:.80} has unknown type {kind}", hint=_HINT
            )
        kind, count = self.unpack("<IQ", key)
        if kind in _SCALARS:
            return self.scalars(kind, count, key)
        self.check_count(count, 8, f"entries of {key}")
        return [self.value(kind, key, depth + 1) for _ in range(count)]

    def scalars(self, kind: int, count: int, key: str) -> npt.NDArray[Any]:
        dtype = np.dtype(_SCALARS[kind])
        self.need(count * dtype.itemsize, key)
        found = np.frombuffer(self.view, dtype, count, self.at)
        self.at += count * dtype.itemsize
        return found
