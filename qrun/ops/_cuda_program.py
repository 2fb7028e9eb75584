"""A traced step as one CUDA graph of our own, replayed without MLX.

A decode step is some two hundred kernels of a few microseconds. MLX needs as long to enqueue each
of them as they run, so the step is traced once with stand-ins for its arrays, its launches are
captured into a graph, and a token costs one launch of that graph:

    inputs --copy--> fixed memory --graph--> outputs

Each kernel may start while the one before it still runs (programmatic dependent launch): it reads
its weights ahead and waits by itself (`wait_for_previous_kernel` of kernels/common/ptx.cuh).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from qrun.ops import _cuda_driver as driver
from qrun.ops._cuda_compile import compile_all
from qrun.ops._cuda_launch import Kernel, Output, Shape, by_mlx, run_by
from qrun.ops._launch import Arrays, Step, enqueued

ALIGNMENT = 256
SMALL = 64  # outputs of up to as many bytes are wanted by the host
SLOTS = 4  # replays in flight whose inputs and small outputs have host memory of their own
ADDRESSES = 32  # arrays whose addresses one kernel writes down


class NotRecordableError(Exception):
    """The step does something with its arrays that is none of our launches."""


@dataclass(frozen=True, eq=False)
class Slot:
    """Stands for an array while a step is recorded: a place in a block of the tape's memory."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    block: int
    start: int = 0  # bytes from the start of the block

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


@dataclass(frozen=True)
class _Launch:
    kernel: Kernel
    arrays: list[mx.array | Slot]  # inputs, then outputs
    numbers: list[int]
    grid: tuple[int, int, int]


class Tape:
    """What a step launches, in order, and the blocks of memory that its results need."""

    def __init__(self) -> None:
        self.inputs: list[Slot] = []
        self.outputs: list[Slot] = []
        self.launches: list[_Launch] = []
        self.sizes: list[int] = []

    def slot(self, shape: tuple[int, ...], dtype: mx.Dtype) -> Slot:
        """A new place."""
        made = Slot(tuple(shape), dtype, len(self.sizes))
        self.sizes.append(-(-max(made.nbytes, 1) // ALIGNMENT) * ALIGNMENT)
        return made

    def run(
        self,
        kernel: Kernel,
        inputs: list[mx.array],
        numbers: list[int],
        outputs: list[Output],
        grid: tuple[int, int, int],
    ) -> list[mx.array]:
        """A runner of _cuda_launch.py that only takes notes."""
        made = [self.slot(shape, dtype) for shape, dtype in outputs]
        self.launches.append(_Launch(kernel, [*inputs, *made], numbers, grid))
        return cast(Arrays, made)

    def placed(self) -> tuple[list[int], int]:
        """Where each block begins, and the bytes of all; what is read no more makes room.

        Inputs and outputs stay. A launch writes only when the one before it has ended, so a block
        may follow right upon the last reader of another.
        """
        kept = {slot.block for slot in (*self.inputs, *self.outputs)}
        last = {
            a.block: n
            for n, each in enumerate(self.launches)
            for a in each.arrays
            if isinstance(a, Slot)
        }
        places = [-1] * len(self.sizes)
        free: list[tuple[int, int]] = []  # size, place
        end = 0

        def place(block: int) -> None:
            nonlocal end
            size = self.sizes[block]
            fit = min((f for f in free if f[0] >= size), default=None)
            if fit is None:
                places[block] = end
                end += size
                return
            free.remove(fit)
            places[block] = fit[1]
            if fit[0] > size:
                free.append((fit[0] - size, fit[1] + size))

        for block in sorted(kept):
            place(block)
        for n, each in enumerate(self.launches):
            used = {a.block for a in each.arrays if isinstance(a, Slot)} - kept
            for block in sorted(used):
                if places[block] < 0:
                    place(block)
            free += [(self.sizes[b], places[b]) for b in sorted(used) if last[b] == n]
        return places, end


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
        if program is None or any(a is not b for a, b in zip(state, bound, strict=True)):
            tape = record(step, inputs, state)
            if tape is None:
                by_graph = enqueued(mx.compile(step))
                return by_graph(inputs, state)
            program, bound = Program(tape, inputs, state), state
        return program(inputs), bound

    return run


def once(step: Step) -> Step:
    """The same for a step that runs a single time: launched as it is, without a graph."""

    def run(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        tape = record(step, inputs, state)
        if tape is None:
            return enqueued(step)(inputs, state)
        return Program(tape, inputs, state, graph=False)(inputs), state

    return run


def record(step: Step, inputs: Arrays, state: Arrays) -> Tape | None:
    """What the step launches; None if it does something else with its arrays."""
    tape = Tape()
    tape.inputs = [tape.slot(a.shape, a.dtype) for a in inputs]
    try:
        with run_by(tape.run):
            outputs, _ = step(cast(Arrays, tape.inputs), state)
    except (NotRecordableError, TypeError, ValueError):  # how MLX refuses a Slot
        return None
    if not all(isinstance(o, Slot) for o in outputs):
        return None
    tape.outputs = cast(list[Slot], outputs)
    return tape


class Pending:
    """A small result of a replay under way."""

    def __init__(self, program: Program, slot: Slot, event: driver.Event, host: Any) -> None:
        self.program, self.slot = program, slot
        self.shape, self.dtype = slot.shape, slot.dtype
        self._event, self._host = event, host

    def item(self) -> int | float:
        """The value, once it is there. To be asked for before SLOTS more replays are enqueued."""
        self._event.wait()
        number = np.frombuffer(self._host, np.int32 if self.slot.dtype == mx.int32 else np.float32)
        return number[0].item()


class Program:
    """A recorded step. Replays follow each other on a stream of its own."""

    def __init__(self, tape: Tape, inputs: Arrays, state: Arrays, *, graph: bool = True) -> None:
        self._inputs, self._outputs = tape.inputs, tape.outputs
        self._small = [s for s in self._outputs if s.nbytes <= SMALL]
        self._places, size = tape.placed()
        self._memory = mx.zeros(size, mx.uint8)
        compile_all([each.kernel.text for each in tape.launches])
        made = [a for a in inputs if not isinstance(a, Pending)]
        mx.eval(self._memory, made, state)
        mx.synchronize()
        # Everything that a launch reads or writes outside the memory stays alive with the program.
        found = (a for each in tape.launches for a in each.arrays if isinstance(a, mx.array))
        self._held = list({id(a): a for a in found}.values())
        self._base, *others = addresses([self._memory, *self._held])
        self._where = {id(a): at for a, at in zip(self._held, others, strict=True)}
        self._stream = driver.Stream()
        self._host = driver.Pinned(SLOTS * SMALL * (len(inputs) + len(self._small)))
        self._events = [driver.Event() for _ in range(SLOTS)]
        self._replays = 0
        self._launches = tape.launches
        self._graph = driver.Graph(self._stream) if graph else None
        if self._graph is not None:
            self._launch()
            self._graph.end()

    def _launch(self) -> None:
        for each in self._launches:
            kernel = each.kernel
            self._stream.launch(
                driver.function(kernel.cubin, kernel.name, kernel.shape.shared),
                each.grid,
                kernel.shape.threads,
                kernel.shape.shared,
                [self._at(a) if isinstance(a, Slot) else self._where[id(a)] for a in each.arrays],
                each.numbers,
                early=EARLY,
            )

    def _at(self, slot: Slot) -> int:
        """Its address on the device."""
        return self._base + self._places[slot.block] + slot.start

    def __call__(self, inputs: Arrays) -> Arrays:
        """Enqueue a replay. Large outputs are copied, which waits for it."""
        driver.enter()
        turn = self._replays % SLOTS
        self._replays += 1
        host = self._host.address + turn * SMALL * (len(self._inputs) + len(self._small))
        for slot, value in zip(self._inputs, inputs, strict=True):
            self._place(slot, value, host)
            host += SMALL
        if self._graph is None:
            self._launch()
        else:
            self._graph.launch()
        event = self._events[turn]
        pending: dict[int, Pending] = {}
        for slot in self._small:
            driver.to_host(self._stream, host, self._at(slot), slot.nbytes)
            pending[id(slot)] = Pending(self, slot, event, self._host.part(host, slot.nbytes))
            host += SMALL
        event.record(self._stream)
        return [cast(Any, pending.get(id(s))) or self._copied(s) for s in self._outputs]

    def _place(self, slot: Slot, value: Any, host: int) -> None:
        """An input into its place: on the device if a replay made it, else by way of the host."""
        if isinstance(value, Pending) and value.program is self:
            driver.on_device(self._stream, self._at(slot), self._at(value.slot), slot.nbytes)
            return
        if isinstance(value, Pending):
            data = np.array([value.item()], np.int32)
        else:
            data = np.array(value.view(mx.uint8) if value.dtype == mx.bfloat16 else value)
        if slot.nbytes <= SMALL:
            self._host.part(host, slot.nbytes)[:] = data.tobytes()
            driver.to_device(self._stream, self._at(slot), host, slot.nbytes)
        else:
            driver.write(self._stream, self._at(slot), data.tobytes())

    def _copied(self, slot: Slot) -> mx.array:
        """An output as an array of MLX that later replays leave alone."""
        self._stream.wait()
        start = self._places[slot.block] + slot.start
        part = self._memory[start : start + slot.nbytes]
        copy = part.view(slot.dtype).reshape(slot.shape) + 0
        mx.eval(copy)
        return copy

    def __del__(self) -> None:
        """Memory must not go back while a replay still writes to it."""
        if "_graph" not in self.__dict__:
            return  # never recorded
        driver.enter()
        self._stream.wait()
        if self._graph is not None:
            self._graph.destroy()
        for event in self._events:
            event.destroy()
        self._stream.destroy()
        self._host.free()


# Whether kernels start early, see above.
EARLY = True


class _Known(NamedTuple):
    """Where an array lies. `kept` is the array itself, or its copy in the order of rows."""

    array: weakref.ref[mx.array]
    kept: mx.array
    address: int


_known: dict[int, _Known] = {}  # by id; gone with the array


def addresses(arrays: Arrays) -> list[int]:
    """Where arrays lie on the device, in the order of rows. To ask takes long: it is remembered."""
    new = [a for a in {id(a): a for a in arrays}.values() if id(a) not in _known]
    kept = [mx.contiguous(a) for a in new]
    mx.eval(kept)
    for array, copy, address in zip(new, kept, _asked(kept), strict=True):
        key = id(array)
        forget = partial(_forget, key)
        _known[key] = _Known(weakref.ref(array, forget), copy, address)
    return [_known[id(a)].address for a in arrays]


def _forget(key: int, _: object) -> None:
    del _known[key]


def _asked(arrays: Arrays) -> list[int]:
    """The addresses of evaluated arrays: a kernel is told, and writes it down."""
    names = [f"a{i}" for i in range(ADDRESSES)]
    text = (
        'extern "C" __global__ void qrun_addresses('
        + "".join(f"const void* {n}, " for n in names)
        + "unsigned long long* out) {\n"
        + "".join(
            f"  out[{i}] = reinterpret_cast<unsigned long long>({n});\n"
            for i, n in enumerate(names)
        )
        + "}\n"
    )
    kernel = Kernel("addresses", "qrun_addresses", text, Shape(1))
    found: list[int] = []
    for start in range(0, len(arrays), ADDRESSES):
        part = arrays[start : start + ADDRESSES]
        padded = part + part[:1] * (ADDRESSES - len(part))
        (out,) = by_mlx(kernel, padded, [], [((ADDRESSES,), mx.uint64)], (1, 1, 1))
        found += [int(v) for v in np.array(out)[: len(part)]]
    return found
