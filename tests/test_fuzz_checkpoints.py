"""Broken checkpoints, thousands of them: each loads and works, or is one clear error.

From a fixed seed. Mutations of config.json, of the index and of safetensors headers, as values and
as bytes. Never another exception, a hang, or more memory than twice the file (and a little).
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from qrun.errors import CheckpointError, QrunError
from qrun.inspect import inspect
from qrun.loader import load
from tests import zoo

EACH = 190  # mutations a case and target; 4 cases x 3 targets of them
CASES = ("llama", "gemma3_text", "mixtral", "phi3_long")
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 1 << 31, (1 << 31) - 1, 1 << 63, 10**30, 0.0, -0.5, 1e300,
    float("nan"), float("inf"), "", "x", "é\ud800", "../../etc/passwd", "a" * 5000, [], {}, [1],
    [[]], {"a": {}}, [None] * 3, {"bits": 4}, "F32", "U32", [0, 0], [1 << 40, 0], [-1, 5],
)  # fmt: skip
SLACK = 1 << 20  # bytes: what a working load takes beside the weights, for instance tables
SLOW = 5.0  # seconds of computing: a load takes hundredths


def spots(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*at, key)
        if isinstance(inner, (dict, list)) and inner:
            yield from spots(inner, (*at, key))


def mutated(value: Any, rng: random.Random) -> Any:
    """One to three changes: another value, a key less, a key more, a value from elsewhere."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        paths = list(spots(value))
        if not paths:
            break
        path = rng.choice(paths)
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        old, kind = holder[path[-1]], rng.randrange(6)
        if kind == 0:
            del holder[path[-1]]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice((f"{path[-1]}x", "rope_parameters", "quantization"))] = old
        elif kind == 2 and isinstance(old, (int, float)):
            holder[path[-1]] = rng.choice((old * 2, old + 1, -old, old // 2, old * 1000, str(old)))
        elif kind == 3:
            other = value
            for key in rng.choice(paths):
                other = other[key]
            holder[path[-1]] = copy.deepcopy(other)
        else:
            holder[path[-1]] = rng.choice(ODD)
    return value


def scrambled(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut out, put in, or the end cut off."""
    broken = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(broken)) if broken else 0
        kind = rng.randrange(4)
        if kind == 0 and broken:
            broken[at] = rng.randrange(256)
        elif kind == 1:
            del broken[at : at + rng.randint(1, 20)]
        elif kind == 2:
            broken[at:at] = rng.choice((b"{", b"}", b"[" * 3000, b'"', b"\0", b"\xff", b"9" * 5000))
        else:
            del broken[at:]
    return bytes(broken)


def written(value: Any) -> bytes:
    return json.dumps(value).encode()


def config_files(folder: Path, rng: random.Random) -> Callable[[], None]:
    path = folder / "config.json"
    whole = path.read_bytes()
    if rng.random() < 0.15:
        path.write_bytes(scrambled(whole, rng))
    else:
        path.write_bytes(written(mutated(json.loads(whole), rng)))
    return lambda: path.write_bytes(whole) and None


def index_files(folder: Path, rng: random.Random) -> Callable[[], None]:
    path = folder / "model.safetensors.index.json"
    whole = path.read_bytes()
    if rng.random() < 0.15:
        path.write_bytes(scrambled(whole, rng))
    else:
        path.write_bytes(written(mutated(json.loads(whole), rng)))
    return lambda: path.write_bytes(whole) and None


def header_files(folder: Path, rng: random.Random) -> Callable[[], None]:
    path = folder / "model-00001-of-00002.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + length], whole[8 + length :]
    kind = rng.randrange(8)
    if kind == 0:
        path.write_bytes(scrambled(whole[:8], rng) + header + data)
    elif kind == 1:
        path.write_bytes(whole[: rng.randrange(len(whole))])
    elif kind == 2:
        path.write_bytes(whole + bytes(rng.randint(1, 9)))
    else:
        new = scrambled(header, rng) if kind == 3 else written(mutated(json.loads(header), rng))
        path.write_bytes(len(new).to_bytes(8, "little") + new + data)
    return lambda: path.write_bytes(whole) and None


TARGETS = {"config": config_files, "index": index_files, "header": header_files}


def attempt(folder: Path) -> str:
    """Load and run, or the error's line."""
    try:
        model = load(folder)
    except QrunError as error:
        return str(error)
    ids = mx.array([1, 2, 3], mx.int32)
    cache = model.new_cache(8)
    hidden = model.model(ids, cache)
    cache.advance(3)
    mx.eval(model.model.logits(model.model(ids[:1], cache)), hidden)
    return ""


@pytest.mark.filterwarnings("ignore:ignored")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz(case: str, target: str, tmp_path: Path) -> None:
    rng = random.Random(f"{case} {target}")
    options = {} if case == "phi3_long" else {"bits": 4}
    folder = zoo.write(tmp_path / "m", case, shards=2, dtype="F16", **options)
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    good = 0
    assert attempt(folder) == ""  # a process's first load takes a chunk that later ones share
    for number in range(EACH):
        undo = TARGETS[target](folder, rng)
        start = time.process_time()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        try:
            line = attempt(folder)
        except Exception as error:
            kept = (folder / "config.json").read_bytes()[:2000]
            raise AssertionError(f"mutation {number} of {target}: {error!r}\n{kept!r}") from error
        used = mx.get_peak_memory() - before
        assert time.process_time() - start < SLOW, (number, line)
        assert used <= 2 * size + SLACK, (number, used, line)
        assert "\n" not in line, (number, line)
        assert len(line) < 3000, (number, len(line))
        good += not line
        undo()
    # Some mutations are harmless, most are not: otherwise this tests nothing.
    assert good < EACH * 0.8
    assert attempt(folder) == ""


def refusal(folder: Path) -> CheckpointError | None:
    try:
        load(folder)
    except CheckpointError as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore:ignored")
@pytest.mark.parametrize("target", TARGETS)
def test_inspect_agrees_with_load(target: str, tmp_path: Path) -> None:
    """Whatever loads, inspect says would load, and the other way round."""
    rng = random.Random(f"inspect {target}")
    folder = zoo.write(tmp_path / "m", "gemma2", shards=2, bits=4, dtype="BF16")
    for number in range(60):
        undo = TARGETS[target](folder, rng)
        report = inspect(folder)
        error = refusal(folder)
        assert report.loads == (error is None), (number, error, report.problems)
        assert report.exit_code == (0 if error is None else 4)
        assert all(p.text and p.remedy for p in report.problems)
        undo()
