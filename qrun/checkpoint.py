"""Weight files of a folder: which there must be, what each holds, and memory-mapped reading.

Everything is checked from the headers before a single weight is read. The format is described at
https://huggingface.co/docs/safetensors: 8 bytes of length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from qrun.config import AGAIN, read_json, refuse_impostors, refuse_non_files
from qrun.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# safetensors name -> the MLX type it stands for
_DTYPES: dict[str, mx.Dtype] = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U8": mx.uint8,
}
# Known to the format, not to us; tolerated unless a model asks for such a tensor.
_OTHER_SIZES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "C64": 8,
}

# Weights that qrun does not read, or not under this name.
_OTHER_FILES = (".bin", ".gguf", ".npz", ".pt", ".pth", ".safetensors")
# What to do where files contradict each other.
_APART = "index and weights are of two downloads: download both again"


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: bytes start .. stop of its file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Checkpoint:
    """All tensors of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Tensor] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for path in weight_files(folder):
            for name, tensor in read_header(path).items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"{path} holds {name}, and so does {self.tensors[name].file.name}",
                        hint=_APART,
                    )
                self.tensors[name] = tensor
        check_index(folder, self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.stop - t.start for t in self.tensors.values())

    def read(self, name: str) -> mx.array:
        """One tensor, copied once: from the mapped file into MLX's memory."""
        tensor = self.tensors[name]
        mx_type = mlx_type(name, tensor)
        data: Any = memoryview(self._map(tensor.file))[tensor.start : tensor.stop]
        words: mx.array = mx.array(data.cast({1: "B", 2: "H", 4: "I"}[mx_type.size]))
        return words.view(mx_type).reshape(tensor.shape)

    def release(self) -> None:
        """Give the pages read so far back to the system; they stay in its file cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with open(path, "rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[path]


def mlx_type(name: str, tensor: Tensor) -> mx.Dtype:
    """The MLX type of a tensor. Raises CheckpointError where there is none."""
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"{tensor.file}: {name} has unsupported type {tensor.dtype}",
            hint=f"qrun reads {', '.join(_DTYPES)}: take a checkpoint in one of them",
        )
    return _DTYPES[tensor.dtype]


def weight_files(folder: Path) -> list[Path]:
    """The weight files, from the index or the one file; index and disk are compared both ways."""
    index = folder / INDEX
    present = {p.name for p in folder.glob("model*.safetensors")}
    if not index.exists():
        if present == {SINGLE}:
            return [folder / SINGLE]
        if not present:
            others = sorted(p.name for p in folder.iterdir() if p.suffix in _OTHER_FILES)
            if others:
                raise CheckpointError(
                    f"{folder} has no {SINGLE}, only {others[0]}",
                    hint=f"convert it: qrun convert {folder / others[0]} DST"
                    if others[0].endswith(".gguf")
                    else f"qrun reads {SINGLE}, or model-*.safetensors with an index",
                )
            raise CheckpointError(
                f"{folder} has no {SINGLE}: the download is incomplete or was interrupted",
                hint=AGAIN,
            )
        raise CheckpointError(
            f"{folder} has {', '.join(sorted(present))} but no {INDEX}",
            hint=f"download {INDEX} again",
        )
    wanted = _index_map(index)
    shards = set(wanted.values())
    missing, stray = sorted(shards - present), sorted(present - shards)
    if missing:
        raise CheckpointError(
            f"{folder / missing[0]} is missing, {INDEX} names it"
            + (
                f" ({len(missing)} of {len(shards)} shards are missing)" if len(missing) > 1 else ""
            ),
            hint=f"if {SINGLE} is the whole model, delete {INDEX}; else {AGAIN}"
            if present == {SINGLE}
            else "the download is incomplete or was interrupted: " + AGAIN,
        )
    if stray:
        raise CheckpointError(
            f"{folder / stray[0]} is not named in {INDEX}",
            hint="two checkpoints seem to be mixed in this folder: remove one",
        )
    return [folder / name for name in sorted(shards)]


def check_index(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Raise unless the index, if there is one, names the tensors the shards really hold."""
    index = folder / INDEX
    if not index.exists():
        return
    for name, shard in _index_map(index).items():
        if name not in tensors:
            raise CheckpointError(
                f"{folder / shard} does not hold {name}, {INDEX} says it does", hint=_APART
            )
        if tensors[name].file.name != shard:
            raise CheckpointError(
                f"{name} is in {tensors[name].file.name}, but {index} says {shard}", hint=_APART
            )
    unnamed = sorted(set(tensors) - set(_index_map(index)))
    if unnamed:
        raise CheckpointError(
            f"{tensors[unnamed[0]].file} holds {unnamed[0]}, {INDEX} omits it", hint=_APART
        )


def _index_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty", hint=AGAIN)
    for name, shard in cast("dict[str, Any]", weight_map).items():
        if not isinstance(shard, str) or "/" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: {name} points to {shard!r:.80}, not to a weight file", hint=AGAIN
            )
    return cast("dict[str, str]", weight_map)


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, every number checked against the file's size."""
    refuse_non_files(path)
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            first = file.read(64)
            refuse_impostors(path, first)
            if size < 8:
                raise CheckpointError(f"{path} is truncated: it has only {size} bytes", hint=AGAIN)
            length = int.from_bytes(first[:8], "little")
            if length > size - 8:
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file: its header would take {length} "
                    f"bytes, the file has {size}",
                    hint=AGAIN,
                )
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", hint=AGAIN) from None
    try:
        header: Any = json.loads(raw)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} has a broken header", hint=AGAIN) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a broken header", hint=AGAIN)
    header = cast("dict[str, Any]", header)
    header.pop("__metadata__", None)
    tensors = {n: _tensor(path, n, v, 8 + length) for n, v in header.items()}
    _check_extent(path, tensors, 8 + length, size)
    return tensors


def _tensor(path: Path, name: str, value: Any, data: int) -> Tensor:
    """One header entry; `data` is where the tensors' bytes begin."""
    try:
        dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = (*shape, start, stop)
        if not all(type(v) is int and 0 <= v < 1 << 60 for v in numbers):
            raise ValueError
        itemsize = _DTYPES[dtype].size if dtype in _DTYPES else _OTHER_SIZES[dtype]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path}: the header entry of {name!r:.80} is broken", hint=AGAIN
        ) from None
    if stop - start != prod(shape) * itemsize:
        raise CheckpointError(
            f"{path}: {name} has {stop - start} bytes, "
            f"but {dtype} {list(shape)} takes {prod(shape) * itemsize}",
            hint=AGAIN,
        )
    return Tensor(path, dtype, shape, data + start, data + stop)


def _check_extent(path: Path, tensors: dict[str, Tensor], data: int, size: int) -> None:
    """Raise unless the tensors lie one behind the other and end where the file ends."""
    end = data
    for name, tensor in _by_offset(tensors):
        if tensor.start != end:
            raise CheckpointError(
                f"{path}: {name} overlaps another tensor or leaves a gap", hint=AGAIN
            )
        end = tensor.stop
    if end != size:
        what = "truncated" if end > size else "longer than its header says"
        raise CheckpointError(f"{path} is {what}: {size} bytes, should be {end}", hint=AGAIN)


def _by_offset(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop))
