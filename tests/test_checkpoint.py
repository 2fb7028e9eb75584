"""Weight files: what there must be is checked before a weight is read, each fault is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.checkpoint import Checkpoint, read_header
from qrun.errors import CheckpointError
from tests.reference_model import read_safetensors
from tests.tiny import Stored, tiny, write_json, write_safetensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


def fault(folder: Path) -> str:
    """The one line that opening the folder's weights ends with."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_every_tensor_comes_back_bit_for_bit(shards: int, dtype: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tiny(tmp_path, shards=shards, dtype=dtype))
    kinds = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "U32": mx.uint32}
    seen = set[str]()
    for path in tmp_path.glob("*.safetensors"):
        for name, want in read_safetensors(path).items():
            got = checkpoint.read(name)
            assert got.dtype == kinds[checkpoint.tensors[name].dtype]
            wide = got if got.dtype == mx.uint32 else got.astype(mx.float32)
            assert np.array_equal(np.array(wide), want.astype(np.array(wide).dtype)), name
            seen.add(name)
    assert seen == set(checkpoint.tensors)
    checkpoint.release()


def test_arrays_stay_valid_after_release(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tiny(tmp_path))
    array = checkpoint.read("model.norm.weight")
    before = np.array(array)
    checkpoint.release()
    del checkpoint
    assert np.array_equal(np.array(array), before)


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    new = {
        "one byte short": data[:-1],
        "half": data[: len(data) // 2],
        "in the header": data[:100],
        "seven bytes": data[:7],
        "empty": b"",
        "one byte long": data + b"\0",
        "lfs": LFS.encode(),
        "html": b"<!DOCTYPE html>\n<html><body>404</body></html>",
        "html, spaced": b"\n  <HTML>rate limited</HTML>",
        "zeros": bytes(4096),
        "no json": (16).to_bytes(8, "little") + b"{'a': broken!!!}" + data,
        "json list": (2).to_bytes(8, "little") + b"[]",
        "huge header": (1 << 62).to_bytes(8, "little") + b"{}",
    }
    path.write_bytes(new[kind])


DAMAGE = {
    "one byte short": "is truncated: ",
    "half": "is truncated: ",
    "in the header": "is truncated or no safetensors file",
    "seven bytes": "is truncated: it has only 7 bytes",
    "empty": "is empty",
    "one byte long": "is longer than its header says",
    "lfs": "is a git-lfs pointer",
    "html": "is a web page",
    "html, spaced": "is a web page",
    "zeros": "has a broken header",
    "no json": "has a broken header",
    "json list": "has a broken header",
    "huge header": "is truncated or no safetensors file",
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("shards", [1, 3])
def test_case_13_damaged_files_are_named(kind: str, shards: int, tmp_path: Path) -> None:
    tiny(tmp_path, shards=shards)
    victim = sorted(tmp_path.glob("*.safetensors"))[-1]
    damage(victim, kind)
    assert f"{victim} {DAMAGE[kind]}" in fault(tmp_path)


def test_case_13_missing_shard_is_named(tmp_path: Path) -> None:
    tiny(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    line = fault(tmp_path)
    assert str(tmp_path / "model-00002-of-00003.safetensors") in line
    assert "is missing" in line


def test_case_13_several_missing_shards_are_counted(tmp_path: Path) -> None:
    tiny(tmp_path, shards=4)
    for n in (2, 4):
        (tmp_path / f"model-0000{n}-of-00004.safetensors").unlink()
    assert "(2 of 4 shards are missing)" in fault(tmp_path)


@pytest.mark.parametrize("stray", ["model.safetensors", "model-00004-of-00004.safetensors"])
def test_case_13_a_stray_file_is_named(stray: str, tmp_path: Path) -> None:
    tiny(tmp_path, shards=3)
    write_safetensors(tmp_path / stray, {})
    assert fault(tmp_path).startswith(f"{tmp_path / stray} is not named in {INDEX}")


def test_case_13_shards_without_their_index(tmp_path: Path) -> None:
    tiny(tmp_path, shards=2)
    (tmp_path / INDEX).unlink()
    assert f"but no {INDEX}" in fault(tmp_path)


def test_case_13_no_weights_at_all(tmp_path: Path) -> None:
    tiny(tmp_path)
    (tmp_path / SINGLE).unlink()
    assert "has no model.safetensors: the download is incomplete" in fault(tmp_path)


@pytest.mark.parametrize("other", ["pytorch_model.bin", "model-q4.gguf"])
def test_weights_in_another_format_are_named(other: str, tmp_path: Path) -> None:
    tiny(tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / other)
    assert f"only {other}" in fault(tmp_path)


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    write_json(folder / INDEX, index)


def test_index_and_shards_are_compared_both_ways(tmp_path: Path) -> None:
    tiny(tmp_path, shards=2)
    change_index(tmp_path, lambda m: m.update(ghost=m["model.norm.weight"]))
    assert "does not hold ghost" in fault(tmp_path)
    change_index(tmp_path, lambda m: (m.pop("ghost"), m.pop("model.norm.weight")))
    assert f"holds model.norm.weight, {INDEX} omits it" in fault(tmp_path)


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    tiny(tmp_path, shards=2)
    other = "model-00001-of-00002.safetensors"
    change_index(tmp_path, lambda m: m.update({"model.norm.weight": other}))
    assert f"says {other}" in fault(tmp_path)


def test_a_tensor_twice_is_named(tmp_path: Path) -> None:
    tiny(tmp_path, shards=2)
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].write_bytes(shards[0].read_bytes())
    assert "and so does" in fault(tmp_path)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"a": "b"}']
)
def test_a_broken_index_is_named(content: str, tmp_path: Path) -> None:
    tiny(tmp_path, shards=2)
    (tmp_path / INDEX).write_text(content)
    assert INDEX in fault(tmp_path)


@pytest.mark.parametrize("target", ["../secret.safetensors", "/etc/passwd", "model.bin"])
def test_an_index_cannot_point_out_of_its_folder(target: str, tmp_path: Path) -> None:
    tiny(tmp_path, shards=2)
    change_index(tmp_path, lambda m: m.update({"model.norm.weight": target}))
    assert "not to a weight file" in fault(tmp_path)


def header_file(path: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    "entry",
    [
        {},
        7,
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": [], "shape": [1], "data_offsets": [0, 4]},
    ],
)
def test_broken_header_entries_are_named(entry: object, tmp_path: Path) -> None:
    path = header_file(tmp_path / SINGLE, {"a": entry}, bytes(4))
    with pytest.raises(CheckpointError, match="the header entry of 'a' is broken"):
        read_header(path)


def test_sizes_that_contradict_the_shape_are_named(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}
    path = header_file(tmp_path / SINGLE, {"a": entry}, bytes(4))
    with pytest.raises(CheckpointError, match=r"a has 4 bytes, but F32 \[3\] takes 12"):
        read_header(path)


@pytest.mark.parametrize("start", [0, 8])
def test_overlaps_and_gaps_are_named(start: int, tmp_path: Path) -> None:
    first = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    second = {"dtype": "F32", "shape": [1], "data_offsets": [start, start + 4]}
    path = header_file(tmp_path / SINGLE, {"a": first, "b": second}, bytes(12))
    with pytest.raises(CheckpointError, match="overlaps another tensor or leaves a gap"):
        read_header(path)


def test_case_21_a_type_that_qrun_does_not_compute_in_is_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path / SINGLE, {"a": ("F64", np.zeros(3))})
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="a has unsupported type F64"):
        checkpoint.read("a")


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    tensors: dict[str, Stored] = {
        "none": ("F32", np.zeros((0, 4), np.float32)),
        "one": ("F32", np.array(2.5, np.float32)),
    }
    write_safetensors(tmp_path / SINGLE, tensors)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.read("one").item() == 2.5
    assert checkpoint.read("none").shape == (0, 4)
