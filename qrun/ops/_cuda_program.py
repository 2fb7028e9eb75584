"""A traced step as one CUDA graph of our own, replayed without MLX.

A decode step is some two hundred kernels of a few microseconds. MLX needs as long to enqueue each
of them as they run, so the step is traced once with stand-ins for its arrays, its launches are
captured into a graph, and a token costs one launch of that graph:

    inputs --copy--> fixed memory --graph--> outputs

Each kernel may start while the one before it still runs (programmatic dependent launch): it reads
its weights ahead and waits by itself (`wait_for_previous_kernel` of kernels/common/ptx.cuh).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import mlx.core as mx
import numpy as np

from qrun.ops import _cuda_driver as driver
from qrun.ops._cuda_addresses import addresses
from qrun.ops._cuda_compile import compile_all
from qrun.ops._cuda_launch import Plan, run_by
from qrun.ops._cuda_memory import ENDLESS, Room, aligned
from qrun.ops._launch import Arrays, Step, enqueued

SMALL = 64  # outputs of up to as many bytes are wanted by the host
SLOTS = 4  # replays in flight whose inputs and small outputs have host memory of their own


class NotRecordableError(Exception):
    """The step does something with its arrays that is none of our launches."""


class Block:
    """Memory for one result of a launch; address 0 as long as nobody knows."""

    __slots__ = ("address", "size")

    def __init__(self, size: int, address: int = 0) -> None:
        self.size, self.address = size, address  # in bytes


class Slot:
    """Stands for an array where our own launches make it: a place in a block of memory."""

    __slots__ = ("block", "dtype", "shape", "start")

    def __init__(
        self, shape: tuple[int, ...], dtype: mx.Dtype, block: Block, start: int = 0
    ) -> None:
        self.shape, self.dtype, self.block = shape, dtype, block
        self.start = start  # bytes from the start of the block

    @property
    def address(self) -> int:
        return self.block.address + self.start

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.size

    def __getitem__(self, rows: object) -> Slot:
        """Some of the rows."""
        if not isinstance(rows, slice):
            raise NotRecordableError("an index")
        first, behind, step = rows.indices(self.shape[0])
        if step != 1 or behind <= first:
            raise NotRecordableError("a slice")
        at = self.start + first * prod(self.shape[1:]) * self.dtype.size
        return Slot((behind - first, *self.shape[1:]), self.dtype, self.block, at)

    def __getattr__(self, name: str) -> Any:
        raise NotRecordableError(name)


def new_slot(
    shape: tuple[int, ...], dtype: mx.Dtype, block: Callable[[int], Block] = Block
) -> Slot:
    """A place of that shape at the start of a block of its own."""
    return Slot(shape, dtype, block(aligned(prod(shape) * dtype.size)))


NOT_RECORDABLE = (NotRecordableError, TypeError, ValueError)  # the latter: how MLX refuses a Slot


@dataclass(frozen=True)
class _Launch:
    plan: Plan
    arrays: list[mx.array | Slot]  # inputs, then outputs


class Tape:
    """What a step launches, in order."""

    def __init__(self) -> None:
        self.inputs: list[Slot] = []
        self.outputs: list[Slot] = []
        self.launches: list[_Launch] = []

    def run(self, plan: Plan, inputs: Arrays) -> Arrays:
        """A runner of _cuda_launch.py that only takes notes."""
        made = [new_slot(shape, dtype) for shape, dtype in plan.outputs]
        self.launches.append(_Launch(plan, [*inputs, *made]))
        return cast(Arrays, made)

    def outside(self) -> Arrays:
        """What the launches read and write besides their own results and the inputs."""
        found = (a for each in self.launches for a in each.arrays if isinstance(a, mx.array))
        return list({id(a): a for a in found}.values())

    def placed(self) -> tuple[dict[Block, int], int]:
        """Where each block begins, and the bytes of all; what is read no more makes room.

        Inputs and outputs stay. A launch writes only when the one before it has ended, so a block
        may follow right upon the last reader of another.
        """
        kept = {slot.block: None for slot in (*self.inputs, *self.outputs)}
        uses = [
            {a.block: None for a in each.arrays if isinstance(a, Slot)} for each in self.launches
        ]
        last = {block: n for n, blocks in enumerate(uses) for block in blocks}
        room = Room(lambda size: (0, ENDLESS))
        places = {block: room.take(block.size) for block in kept}
        for n, blocks in enumerate(uses):
            for block in blocks:
                if block not in places:
                    places[block] = room.take(block.size)
            for block in blocks:
                if last[block] == n and block not in kept:
                    room.give(places[block], block.size)
        return places, max((at + block.size for block, at in places.items()), default=0)


def traced(step: Step) -> Step:
    """The step as a program, where all it does is launch our kernels; else as MLX compiles it.

    State is written in place, so the program keeps the arrays of the first call. Small outputs
    come back as `Pending`; their values stay on the device where the next step takes them.
    """
    program: Program | None = None
    bound: Arrays = []
    by_graph: Step | None = None

    def run(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        nonlocal program, bound, by_graph
        if by_graph is not None:
            return by_graph(inputs, state)
        with driver.LOCK:
            if program is None or any(a is not b for a, b in zip(state, bound, strict=True)):
                program, tape = None, record(step, inputs, state)
                if tape is not None:
                    program, bound = Program(tape, inputs, state), state
            if program is not None:
                return program(inputs), bound
            driver.stream().wait()  # for what MLX knows nothing of
            by_graph = enqueued(mx.compile(step))
        return by_graph(inputs, state)

    return run


def record(step: Step, inputs: Arrays, state: Arrays) -> Tape | None:
    """What the step launches; None if it does something else with its arrays."""
    tape = Tape()
    tape.inputs = [new_slot(a.shape, a.dtype) for a in inputs]
    try:
        with run_by(tape.run):
            outputs, _ = step(cast(Arrays, tape.inputs), state)
    except NOT_RECORDABLE:
        return None
    if not all(isinstance(o, Slot) for o in outputs):
        return None
    tape.outputs = cast(list[Slot], outputs)
    return tape


def load(tape: Tape) -> None:
    """Its kernels onto the device; those never compiled yet are compiled side by side."""
    kernels = {each.plan.kernel.name: each.plan.kernel for each in tape.launches}
    compile_all([kernel.text for kernel in kernels.values() if not driver.loaded(kernel)])
    for kernel in kernels.values():
        driver.function(kernel)


class Mail:
    """Host memory for the small inputs and outputs of some replays in flight."""

    def __init__(self, places: int) -> None:
        self._size = SMALL * places
        self._memory = driver.Pinned(SLOTS * self._size)
        self._events = [driver.Event() for _ in range(SLOTS)]
        self._turns = 0

    def turn(self) -> tuple[int, driver.Event]:
        """The next one's first address, and the event that says that it is over."""
        self._turns += 1
        at = self._turns % SLOTS
        return self._memory.address + at * self._size, self._events[at]

    def part(self, address: int, size: int) -> memoryview:
        """Some of the bytes, to read and write."""
        return self._memory.part(address, size)

    def free(self) -> None:
        """Give it back."""
        for event in self._events:
            event.destroy()
        self._memory.free()


class Pending:
    """A small result under way: at `address` on the device, and by the time of `event` at `host`.

    owner: whose memory that is. over() is called once the value is there.
    """

    def __init__(
        self,
        slot: Slot,
        address: int,
        event: driver.Event,
        host: memoryview,
        owner: object,
        over: Callable[[], None] | None = None,
    ) -> None:
        self.shape, self.dtype, self.nbytes = slot.shape, slot.dtype, slot.nbytes
        self.address, self._event, self._host = address, event, host
        self._owner, self._over = owner, over

    def item(self) -> int | float:
        """The value, once it is there. To be asked for before SLOTS more runs are enqueued."""
        self._event.wait()
        if self._over is not None:
            self._over()
        number = np.frombuffer(self._host, np.int32 if self.dtype == mx.int32 else np.float32)
        return number[0].item()


class Program:
    """A recorded step as a graph; its replays follow each other on our stream."""

    def __init__(self, tape: Tape, inputs: Arrays, state: Arrays) -> None:
        self._inputs, self._outputs = tape.inputs, tape.outputs
        self._small = [s for s in self._outputs if s.nbytes <= SMALL]
        self._places, size = tape.placed()
        self._memory = mx.zeros(size, mx.uint8)
        load(tape)
        made = [a for a in inputs if not isinstance(a, Pending)]
        mx.eval(self._memory, made, state)
        mx.synchronize()
        # Everything that a launch reads or writes outside the memory stays alive with the program.
        self._held = tape.outside()
        self._base, *others = addresses([self._memory, *self._held])
        where = {id(a): at for a, at in zip(self._held, others, strict=True)}
        self._mail = Mail(len(inputs) + len(self._small))
        self._graph = driver.Graph()
        for each in tape.launches:
            at = [self._at(a) if isinstance(a, Slot) else where[id(a)] for a in each.arrays]
            self._graph.stream.launch(each.plan, at)
        self._graph.end()

    def _at(self, slot: Slot) -> int:
        """Its address on the device."""
        return self._base + self._places[slot.block] + slot.start

    def __call__(self, inputs: Arrays) -> Arrays:
        """Enqueue a replay. Large outputs are copied, which waits for it."""
        driver.enter()
        stream = driver.stream()
        host, event = self._mail.turn()
        for slot, value in zip(self._inputs, inputs, strict=True):
            self._place(stream, slot, value, host)
            host += SMALL
        self._graph.launch(stream)
        pending: dict[int, Pending] = {}
        for slot in self._small:
            at, place = self._at(slot), self._mail.part(host, slot.nbytes)
            driver.to_host(stream, host, at, slot.nbytes)
            pending[id(slot)] = Pending(slot, at, event, place, self)
            host += SMALL
        event.record(stream)
        return [cast(Any, pending.get(id(s))) or self._copied(s) for s in self._outputs]

    def _place(self, stream: driver.Stream, slot: Slot, value: Any, host: int) -> None:
        """An input into its place: on the device if a launch made it, else by way of the host."""
        if isinstance(value, Pending):
            driver.on_device(stream, self._at(slot), value.address, slot.nbytes)
        elif slot.nbytes <= SMALL:
            self._mail.part(host, slot.nbytes)[:] = bytes_of(value)
            driver.to_device(stream, self._at(slot), host, slot.nbytes)
        else:
            driver.send(stream, self._at(slot), bytes_of(value))

    def _copied(self, slot: Slot) -> mx.array:
        driver.stream().wait()
        return copied(self._memory, self._places[slot.block] + slot.start, slot)

    def __del__(self) -> None:
        """Memory must not go back while a replay still writes to it."""
        if "_graph" not in self.__dict__:
            return  # never recorded
        driver.enter()
        driver.stream().wait()
        self._graph.destroy()
        self._mail.free()


def bytes_of(array: mx.array) -> bytes:
    """Its values, in the order of rows."""
    return np.array(array.view(mx.uint8) if array.dtype == mx.bfloat16 else array).tobytes()


def copied(memory: mx.array, start: int, slot: Slot) -> mx.array:
    """What lies at byte `start` of memory, as an array of MLX that later launches leave alone."""
    copy = memory[start : start + slot.nbytes].view(slot.dtype).reshape(slot.shape) + 0
    mx.eval(copy)
    return copy
