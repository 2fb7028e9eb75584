"""A step launched as it goes: what reaches the driver, and where its results lie. No GPU needed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from qrun.generation import forward
from qrun.loader import load
from qrun.ops import _cuda, _cuda_direct, _cuda_driver, _cuda_product, _cuda_program, _launch
from qrun.ops._cuda_launch import Plan
from qrun.ops._cuda_memory import ALIGNMENT, Room
from qrun.ops._cuda_program import Slot, Tape, record
from qrun.ops._launch import Arrays
from tests import zoo


class Card:
    """Stands for the driver: takes down what it is asked to launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[tuple[str, list[int]]] = []  # kernel and pointers, in order
        self.kernels: set[str] = set()  # loaded
        self._free = count(1 << 40, 1 << 32)
        self._at: dict[int, tuple[mx.array, int]] = {}
        for name in ("enter", "send", "to_host", "on_device"):
            monkeypatch.setattr(_cuda_driver, name, lambda *_: None)
        monkeypatch.setattr(_cuda_driver, "stream", lambda: self)
        monkeypatch.setattr(_cuda_driver, "loaded", lambda kernel: kernel.name in self.kernels)
        monkeypatch.setattr(_cuda_driver, "Event", lambda: self)
        monkeypatch.setattr(_cuda_driver, "Pinned", lambda size: self)
        monkeypatch.setattr(_cuda_program, "load", self.load)
        monkeypatch.setattr(_cuda_direct, "addresses", lambda arrays: [*map(self.at, arrays)])
        monkeypatch.setattr(_cuda_direct, "address_of", self.at)
        monkeypatch.setattr(_cuda_product, "generation", lambda: 9)
        monkeypatch.setattr(_launch, "backend", lambda: _cuda)
        _cuda_direct.memory.cache_clear()

    address = 0  # of pinned memory

    def at(self, array: mx.array) -> int:
        return self._at.setdefault(id(array), (array, next(self._free)))[1]

    def load(self, tape: Tape) -> None:
        self.kernels |= {each.plan.kernel.name for each in tape.launches}

    def launch(self, plan: Plan, pointers: list[int]) -> None:
        assert plan.kernel.name in self.kernels
        self.launched.append((plan.kernel.name, pointers))

    def part(self, address: int, size: int) -> memoryview:
        return memoryview(bytes(size))

    def done(self) -> bool:
        return False

    def nothing(self, *_: object) -> None: ...

    record = wait = destroy = free = nothing


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    yield Card(monkeypatch)
    _cuda_direct.under_way.clear()
    _cuda_direct.letters.clear()
    _cuda_direct.memory.cache_clear()


@pytest.mark.parametrize("case", ["llama", "qwen3", "olmo2", "gemma2"])
def test_results_lie_apart_as_long_as_they_are_read(case: str, tmp_path: Path, card: Card) -> None:
    model = load(zoo.write(tmp_path / case, case, bits=4), dtype="bfloat16")
    cache = model.new_cache(64)
    step = forward(model, cache, lambda logits: _cuda.argmax(logits, logits.shape[1]))
    inputs = [mx.zeros(40, mx.int32), cache.offset]
    tape = record(step, inputs, cache.state)
    assert tape is not None
    for _ in range(2):  # in fresh memory, and in used
        card.launched.clear()
        (answer,), _ = _cuda_direct.once(step)(inputs, cache.state)
        assert (answer.shape, answer.dtype) == ((1,), mx.int32)
        assert [name for name, _ in card.launched] == [
            each.plan.kernel.name for each in tape.launches
        ]

        where: dict[Any, int] = {}
        uses: dict[Any, list[int]] = {}
        for n, (each, (_, pointers)) in enumerate(zip(tape.launches, card.launched, strict=True)):
            for a, at in zip(each.arrays, pointers, strict=True):
                if isinstance(a, Slot):
                    assert where.setdefault(a.block, at - a.start) == at - a.start
                    uses.setdefault(a.block, []).append(n)
                else:
                    assert at == card.at(a)
        assert len(uses) > 20
        for slot in tape.inputs:
            uses[slot.block].append(0)
        for a, when in uses.items():
            for b, other in uses.items():
                if a is not b and min(when) <= max(other) and min(other) <= max(when):
                    assert where[a] + a.size <= where[b] or where[b] + b.size <= where[a]


def test_what_is_not_ours_runs_on_mlx(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        return [inputs[0] + 1], state

    outputs, _ = _cuda_direct.once(step)([mx.array([1, 2])], [])
    assert outputs[0].tolist() == [2, 3]
    assert card.launched == []


def test_room_gives_ranges_that_do_not_overlap_and_joins_what_comes_back() -> None:
    asked: list[int] = []

    def grow(size: int) -> tuple[int, int]:
        asked.append(size)
        return 10_000 * ALIGNMENT * len(asked), 64 * ALIGNMENT

    room = Room(grow)
    sizes = [ALIGNMENT * n for n in (5, 1, 17, 3, 30, 8)]
    taken = [room.take(size) for size in sizes]
    assert asked == [sizes[0]]  # 64 of one range
    spans = sorted(zip(taken, sizes, strict=True))
    assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
    for at, size in zip(taken[::2] + taken[1::2], sizes[::2] + sizes[1::2], strict=True):
        room.give(at, size)
    assert room.take(64 * ALIGNMENT) == 10_000 * ALIGNMENT  # whole again
    assert len(asked) == 1
    assert room.take(ALIGNMENT) >= 20_000 * ALIGNMENT


def test_what_is_taken_lies_in_one_range() -> None:
    starts = iter((0, 4 * ALIGNMENT))  # side by side
    room = Room(lambda size: (next(starts), 4 * ALIGNMENT))
    taken = [room.take(4 * ALIGNMENT) for _ in range(2)]
    for at in taken:
        room.give(at, 4 * ALIGNMENT)
    with pytest.raises(StopIteration):
        room.take(5 * ALIGNMENT)
