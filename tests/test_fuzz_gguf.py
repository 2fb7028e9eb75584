"""Broken GGUFs, whole and in parts, from a fixed seed: each converts, or is one clear line.

Never another exception, a hang, a leftover, or more memory than twice the files (and a little).
"""

from __future__ import annotations

import os
import random
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.convert import convert
from qrun.errors import QrunError
from qrun.gguf import open_gguf
from tests.gguf_writer import tiny_gguf, write_gguf
from tests.test_gguf_parts import apart

EACH = 400  # mutations of each form
ODD = (0, 1, 2, 3, 7, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 61,
       (1 << 63) - 1, (1 << 64) - 1)  # fmt: skip
SLACK = 1 << 20  # bytes beside the tensors: the tokenizer as text and as objects
SLOW = 5.0  # seconds of computing: a conversion takes hundredths


def number(data: bytearray, rng: random.Random, end: int) -> None:
    """Another count, length, type or offset, wherever one may lie."""
    width = rng.choice((4, 8))
    at = rng.randrange(end - width)
    data[at : at + width] = (rng.choice(ODD) % (1 << 8 * width)).to_bytes(width, "little")


def byte(data: bytearray, rng: random.Random, end: int) -> None:
    data[rng.randrange(end)] = rng.randrange(256)


def shift(data: bytearray, rng: random.Random, end: int) -> None:
    """Everything behind lies elsewhere than it says."""
    at = rng.randrange(end)
    if rng.random() < 0.5:
        del data[at : at + rng.randint(1, 40)]
    else:
        data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 40)))


def cut(data: bytearray, rng: random.Random, end: int) -> None:
    del data[rng.randrange(rng.choice((end, len(data)))) :]


def copied(data: bytearray, rng: random.Random, end: int) -> None:
    """A piece of the header once more, over another one."""
    size, here, there = rng.randint(1, 60), rng.randrange(end), rng.randrange(end)
    data[there : there + size] = data[here : here + size]


Damage = Callable[[bytearray, random.Random, int], None]
DAMAGE: tuple[Damage, ...] = (number, number, number, byte, byte, shift, cut, copied)


def whole(folder: Path) -> list[Path]:
    metadata, tensors = tiny_gguf(np.random.default_rng(4), "Q4_0", layers=1)
    return [write_gguf(folder / "m.gguf", metadata, tensors)]


def mixture(folder: Path) -> list[Path]:
    """With a tensor an expert, so that there are many."""
    metadata, tensors = tiny_gguf(np.random.default_rng(4), "Q4_0", layers=1, experts=4)
    return [write_gguf(folder / "m.gguf", metadata, apart(tensors))]


def parts(folder: Path) -> list[Path]:
    metadata, tensors = tiny_gguf(np.random.default_rng(4), "Q4_1", layers=1)
    names, paths = list(tensors), []
    for i in range(3):
        numbers: dict[str, Any] = {"split.no": i, "split.count": 3}
        numbers["split.tensors.count"] = len(names)
        part = {n: tensors[n] for n in names[i::3]}
        path = folder / f"m-{i + 1:05}-of-00003.gguf"
        paths.append(write_gguf(path, (metadata if i == 0 else {}) | numbers, part))
    return paths


def disturbed(paths: list[Path], rng: random.Random) -> None:
    """What happens to parts as files: one is missing, is another one, or is a link to itself."""
    path, other = rng.sample(paths, 2)
    kind = rng.randrange(4)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(other.read_bytes())
    elif kind == 2:
        path.write_bytes(b"")
    else:
        path.unlink()
        path.mkdir()


def restore(path: Path, content: bytes) -> None:
    if path.is_dir():
        path.rmdir()
    path.write_bytes(content)


@pytest.mark.parametrize("form", [whole, mixture, parts])
def test_fuzz(
    form: Callable[[Path], list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # nine tenths of the time
    rng = random.Random(form.__name__)
    paths = form(tmp_path)
    contents = {path: path.read_bytes() for path in paths}
    ends = {path: min(t.start for t in open_gguf(path).tensors.values()) for path in paths}
    size = sum(map(len, contents.values()))
    out = tmp_path / "out"
    good = 0
    for i in range(EACH):
        victim = rng.choice(paths)
        if len(paths) > 1 and rng.random() < 0.1:
            disturbed(paths, rng)
        else:
            data = bytearray(contents[victim])
            for _ in range(rng.choice((1, 1, 2))):
                rng.choice(DAMAGE)(data, rng, min(ends[victim], len(data) - 8))
            victim.write_bytes(data)
        given = rng.choice(paths)
        line = ""
        tracemalloc.start()
        mx.reset_peak_memory()
        before, start = mx.get_active_memory(), time.process_time()
        try:
            convert(given, out, force=True)
        except QrunError as error:
            line = str(error)
        except Exception as error:
            raise AssertionError(f"mutation {i}: {error!r}") from error
        finally:
            used = tracemalloc.get_traced_memory()[1] + mx.get_peak_memory() - before
            tracemalloc.stop()
        assert time.process_time() - start < SLOW, (i, line)
        assert used <= 2 * size + SLACK, (i, used, line)
        assert "\n" not in line, (i, line)
        assert len(line) < 1000, (i, len(line))
        assert set(os.listdir(tmp_path)) <= {"out", *(p.name for p in paths)}, i
        good += not line
        for path, content in contents.items():
            restore(path, content)
    # Some damage is harmless, most is not: otherwise this tests nothing.
    assert 0 < good < EACH * 0.6
    shutil.rmtree(out, ignore_errors=True)
    convert(paths[-1], out)
