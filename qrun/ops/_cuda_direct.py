"""A step that runs a single time, such as a prompt: each launch goes out as soon as it is known.

The card works on the first layer while Python still asks for the second. The memory of a result
goes back when nobody holds its stand-in any more: launches keep their order, so whoever takes it
next writes after its last reader.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any, cast

import mlx.core as mx

from qrun.ops import _cuda_driver as driver
from qrun.ops import _cuda_program as program
from qrun.ops._cuda_addresses import address_of, addresses
from qrun.ops._cuda_launch import Plan, run_by
from qrun.ops._cuda_memory import Room
from qrun.ops._cuda_program import SMALL, Block, Mail, Pending, Slot, bytes_of, new_slot, record
from qrun.ops._launch import Arrays, Step, enqueued

LEAST = 1 << 25  # bytes that memory grows by


class _NewKernelError(Exception):
    """A kernel that is not on the device yet: better to look for all of them first."""


class _Memory:
    """Device memory that results are made in. It stays, for the next prompt needs it again."""

    def __init__(self) -> None:
        self.room = Room(self._more)
        self._parts: dict[int, mx.array] = {}  # by address

    def _more(self, size: int) -> tuple[int, int]:
        size = max(size, LEAST, sum(part.nbytes for part in self._parts.values()))
        part = mx.zeros(size, mx.uint8)
        (address,) = addresses([part])
        self._parts[address] = part
        return address, size

    def copied(self, slot: Slot, address: int) -> mx.array:
        """What lies there, as an array of MLX."""
        start = max(a for a in self._parts if a <= address)
        return program.copied(self._parts[start], address - start, slot)


@cache
def memory() -> _Memory:
    return _Memory()


letters: list[Mail] = []  # that nobody holds


class _Letter:
    """A place in host memory for a small result, as long as somebody waits for it or holds it."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot  # and its block
        self._mail = letters.pop() if letters else Mail(1)
        self.host, self.event = self._mail.turn()
        self.place = self._mail.part(self.host, slot.nbytes)

    def __del__(self) -> None:
        letters.append(self._mail)


class _Lent(Block):
    """A block that goes back by itself."""

    __slots__ = ("_room",)

    def __init__(self, size: int) -> None:
        with driver.LOCK:
            self._room = memory().room
            self.size, self.address = size, self._room.take(size)

    def __del__(self) -> None:
        with driver.LOCK:
            self._room.give(self.address, self.size)


class _Direct:
    """A runner of _cuda_launch.py that launches."""

    def __init__(self) -> None:
        self.held: dict[int, mx.array] = {}  # what the launches read and write, by id

    def run(self, plan: Plan, inputs: Arrays) -> Arrays:
        if not driver.loaded(plan.kernel):
            raise _NewKernelError(plan.kernel.label)
        pointers: list[int] = []
        for array in cast("list[mx.array | Slot]", inputs):
            if isinstance(array, Slot):
                pointers.append(array.address)
            else:
                self.held[id(array)] = array
                pointers.append(address_of(array))
        made = [new_slot(shape, dtype, _Lent) for shape, dtype in plan.outputs]
        pointers += [slot.address for slot in made]
        driver.stream().launch(plan, pointers)
        return cast(Arrays, made)


# The arrays of runs that may still be under way, and the events behind them.
under_way: deque[tuple[driver.Event, Arrays]] = deque()


def once(step: Step) -> Step:
    """The step for a single run: launched as it goes where all it does is launch our kernels.

    State is written in place. A small output comes back as `Pending`.
    """

    def run(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        with driver.LOCK:
            outputs = _launched(step, inputs, state)
            if outputs is None:
                tape = record(step, inputs, state)
                if tape is not None:
                    program.load(tape)
                    addresses(tape.outside())
                    outputs = _launched(step, inputs, state)
            if outputs is not None:
                return outputs, state
            driver.stream().wait()  # for what MLX knows nothing of
        return enqueued(step)(inputs, state)

    return run


def _launched(step: Step, inputs: Arrays, state: Arrays) -> Arrays | None:
    """What it returns; None if it needs a new kernel, or does something else with its arrays."""
    _settle()
    driver.enter()
    stream, direct = driver.stream(), _Direct()
    mx.eval(state)
    addresses(state)
    mx.synchronize()
    slots = [new_slot(a.shape, a.dtype, _Lent) for a in inputs]
    for slot, value in zip(slots, inputs, strict=True):
        if isinstance(value, Pending):
            driver.on_device(stream, slot.address, value.address, value.nbytes)
        else:
            driver.send(stream, slot.address, bytes_of(value))
    try:
        with run_by(direct.run):
            outputs, _ = step(cast(Arrays, slots), state)
    except (_NewKernelError, *program.NOT_RECORDABLE):
        return None
    finally:
        event = driver.Event()
        event.record(stream)
        under_way.append((event, list(direct.held.values())))
    if not all(isinstance(o, Slot) for o in outputs):
        return None
    return [_answer(cast(Any, o)) for o in outputs]


def _answer(slot: Slot) -> Any:
    """A result, small or large."""
    stream, at = driver.stream(), slot.address
    if slot.nbytes > SMALL:
        stream.wait()
        _settle()
        return memory().copied(slot, at)
    letter = _Letter(slot)
    driver.to_host(stream, letter.host, at, slot.nbytes)
    letter.event.record(stream)
    return Pending(slot, at, letter.event, letter.place, letter, _settle)


def _settle() -> None:
    """Let go of the arrays of runs that are over."""
    with driver.LOCK:
        while under_way and under_way[0][0].done():
            under_way.popleft()[0].destroy()
