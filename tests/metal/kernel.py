"""`metal_kernel`: the call of `mx.fast.metal_kernel`, run here.

    kernel = metal_kernel(name, input_names, output_names, source, header=...)
    outputs = kernel(inputs=..., output_shapes=..., output_dtypes=..., grid=..., threadgroup=...)

Outputs start as NaN bytes (0xff). A launch with findings raises `MetalError` unless `check=False`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.metal import arrays, clang, inlining, rewrite
from tests.metal import signature as sig
from tests.metal.lines import LineTable
from tests.metal.lint import lint
from tests.metal.registers import Registers, measure
from tests.metal.report import Finding, MetalError, RawFinding, explain

WRITABLE, INITIALISED = 1, 2
ORDERS = {"forward": 0, "backward": 1, "random": 2}


@dataclass
class Settings:
    """How launches run, unless a kernel says otherwise; change with `settings.use(...)`."""

    order: str = "forward"  # in which fibers and threadgroups run: ORDERS
    seed: int = 0  # of the random order
    check: bool = True  # raise MetalError when a launch has findings
    lint: bool = True  # refuse what Metal refuses and clang accepts
    launches: list[Launch] | None = None  # a list here collects every launch

    @contextlib.contextmanager
    def use(self, **changes: Any) -> Iterator[Settings]:
        before = {name: getattr(self, name) for name in changes}
        for name, value in changes.items():
            setattr(self, name, value)
        try:
            yield self
        finally:
            for name, value in before.items():
                setattr(self, name, value)


settings = Settings()


class _RawBuffer(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("shadow", ctypes.c_void_p),
        ("reads", ctypes.c_void_p),
        ("by_width", ctypes.c_uint64 * 10),  # reads of 1, 2, 4, 8, 16 bytes, then writes
        ("atomics", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class BufferCount:
    """Traffic of one buffer. `reads` and `writes`: width in bytes -> number of accesses."""

    kind: str  # "input", "output", "threadgroup", or "shape", "strides", "ndim"
    bytes: int
    reads: dict[int, int]
    writes: dict[int, int]
    atomics: int
    least_reads: int = 0  # of inputs: how often its least and its most read byte was read
    most_reads: int = 0

    @property
    def read_bytes(self) -> int:
        return sum(w * n for w, n in self.reads.items())

    @property
    def narrowest_read(self) -> int:
        return min(self.reads, default=0)

    @property
    def written_bytes(self) -> int:
        return sum(w * n for w, n in self.writes.items())


@dataclass(frozen=True)
class Counters:
    buffers: dict[str, BufferCount]
    threadgroup_bytes: int
    barriers: int  # threadgroup barriers, all threadgroups together
    simd_barriers: int
    exchanges: int  # shuffles, reductions, votes, multiplies: once a simdgroup
    multiplies: int  # 8x8x8, once a simdgroup
    fragment_loads: int
    fragment_stores: int
    threadgroups: int
    threads: int

    @property
    def multiplies_per_load(self) -> float:
        """Of simdgroup_load; fragments filled through thread_elements are no loads."""
        return self.multiplies / self.fragment_loads if self.fragment_loads else 0.0

    @property
    def threadgroup_bytes_per_multiply(self) -> float:
        """Bytes read from threadgroup memory for each 8x8x8 product, however they were read."""
        read = sum(b.read_bytes for b in self.buffers.values() if b.kind == "threadgroup")
        return read / self.multiplies if self.multiplies else 0.0

    @property
    def barriers_per_threadgroup(self) -> float:
        return self.barriers / self.threadgroups


@dataclass
class Launch:
    name: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    report: list[Finding]
    counters: Counters


class Outputs(list):
    """The output arrays; with `.report` (findings) and `.counters`."""

    def __init__(self, values: list[Any], launch: Launch) -> None:
        super().__init__(values)
        self.launch = launch
        self.report = launch.report
        self.counters = launch.counters


class Compiled:
    """A kernel's shared object, with the runtime in it."""

    def __init__(self, path: Path, array_names: list[str]) -> None:
        self.path = path
        self.array_names = array_names
        self.lib = ctypes.CDLL(str(path))
        self.lib.em_buffer.restype = ctypes.c_void_p
        self.lib.em_buffer.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p]
        self.lib.em_findings.restype = ctypes.POINTER(RawFinding)
        self.lib.em_buffers.restype = ctypes.POINTER(_RawBuffer)
        self.lib.em_stats.restype = ctypes.POINTER(ctypes.c_uint64 * 9)
        for name in ("em_unwritten", "em_threadgroup_bytes"):
            getattr(self.lib, name).restype = ctypes.c_uint64

        rows = inlining.chains(self.lines.image, self.lines.sections)
        self.chains = (ctypes.c_uint32 * (3 * len(rows) + 1))(*[n for row in rows for n in row])
        self.lib.em_chains(self.chains, len(rows))

    @functools.cached_property
    def lines(self) -> LineTable:
        return LineTable(self.path)

    def launch(self, args: Any, grid: tuple, threadgroup: tuple, order: str, seed: int) -> None:
        three = ctypes.c_uint32 * 3
        self.lib.em_launch(
            self.lib.em_entry, args, three(*grid), three(*threadgroup), ORDERS[order],
            ctypes.c_uint64(seed),
        )  # fmt: skip

    def findings(self, names: list[str]) -> list[Finding]:
        count = ctypes.c_uint32()
        raw = self.lib.em_findings(ctypes.byref(count))
        if not count.value:
            return []
        sizes = [b.size for b in self._raw_buffers()]
        named = {i: (n, sizes[i]) for i, n in enumerate(self._all_names(names))}
        return [explain(raw[i], self.lines, named) for i in range(count.value)]

    def counters(self, names: list[str], kinds: list[str]) -> Counters:
        found: dict[str, BufferCount] = {}
        widths = (1, 2, 4, 8, 16)
        raws = self._raw_buffers()
        for i, name in enumerate(self._all_names(names)):
            raw = raws[i]
            least, most = ctypes.c_uint32(), ctypes.c_uint32()
            if raw.reads:
                self.lib.em_read_range(i, ctypes.byref(least), ctypes.byref(most))
            found[name] = BufferCount(
                kind=kinds[i] if i < len(kinds) else "threadgroup",
                bytes=raw.size,
                reads={w: n for w, n in zip(widths, raw.by_width[:5], strict=True) if n},
                writes={w: n for w, n in zip(widths, raw.by_width[5:], strict=True) if n},
                atomics=raw.atomics,
                least_reads=least.value,
                most_reads=most.value,
            )
        stats = list(self.lib.em_stats().contents)
        return Counters(found, self.lib.em_threadgroup_bytes(), *stats[:8])

    def _raw_buffers(self) -> list[_RawBuffer]:
        count = ctypes.c_uint32()
        raw = self.lib.em_buffers(ctypes.byref(count))
        return [raw[i] for i in range(count.value)]

    def _all_names(self, names: list[str]) -> list[str]:
        """Of inputs and outputs, then of threadgroup arrays in the order of first use."""
        count = len(self._raw_buffers())
        every = names + [""] * (count - len(names))
        for array, name in enumerate(self.array_names):
            if index := self.lib.em_group_array_buffer(array):
                every[index - 1] = name
        return every


@functools.lru_cache(maxsize=256)
def lint_source(header: str, body: str) -> None:
    if found := lint(header, "header") + lint(body, "body"):
        raise clang.CompileError("the lint refuses:\n" + "\n".join(found))


def whole_text(
    parts: tuple[str, str, str, str], constants: tuple[tuple[int, Any], ...] = ()
) -> tuple[str, list[str]]:
    """(header, signature, body, entry) -> (what clang compiles, names of threadgroup arrays)."""
    header, signature, body, entry = parts
    rewriter = rewrite.Rewriter(constants=dict(constants))
    header = rewriter(header)
    body = rewriter(body)
    text = (
        f'#line 1 "prelude"\n{sig.PRELUDE}\n#line 1 "header"\n{header}\n'
        f'#line 1 "signature"\n{signature}\n#line 1 "body"\n{body}\n}}\n#line 1 "entry"\n{entry}'
    )
    return text, rewriter.arrays


@functools.lru_cache(maxsize=256)
def compile_parts(
    parts: tuple[str, str, str, str], constants: tuple[tuple[int, Any], ...]
) -> Compiled:
    text, array_names = whole_text(parts, constants)
    return Compiled(clang.build(text), array_names)


@dataclass
class metal_kernel:  # it stands in for mx.fast.metal_kernel
    name: str
    input_names: list[str]
    output_names: list[str]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False
    compile_options: Any = None
    in_place: tuple[str, ...] = ()  # inputs that the kernel may write; their arrays are updated
    order: str | None = None  # the rest is the emulator's own: see Settings
    seed: int | None = None
    check: bool | None = None
    lint: bool | None = None
    function_constants: dict[int, Any] = field(default_factory=dict)
    last: Launch | None = field(default=None, repr=False)

    def __call__(
        self,
        *,
        inputs: list[Any],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: list[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> Outputs:
        template = template or []
        self._check_call(inputs, output_shapes, output_dtypes, grid, threadgroup)
        bits = [arrays.bits_of(x) for x in inputs]
        dtypes = [arrays.dtype_name(d) for d in output_dtypes]
        params, parts = self._text(bits, dtypes, template)
        if verbose:
            print(f"{parts[0]}{parts[1]}{parts[2]}\n}}")
        if settings.lint if self.lint is None else self.lint:
            lint_source(self.header, self.source)
        compiled = compile_parts(parts, tuple(self.function_constants.items()))

        results = [
            arrays.empty_bits(tuple(s), d) for s, d in zip(output_shapes, dtypes, strict=True)
        ]
        if init_value is not None:
            for i, d in enumerate(dtypes):
                results[i] = _filled(results[i].shape, d, init_value)
        self._run(compiled, params, bits, results, grid, threadgroup, init_value is not None)
        for name, x, (held, dtype) in zip(self.input_names, inputs, bits, strict=True):
            if name in self.in_place:
                x[...] = arrays.from_bits(held, dtype, arrays.is_mlx(x))
        as_mlx = any(arrays.is_mlx(x) for x in inputs) or any(map(arrays.is_mlx, output_dtypes))
        values = [arrays.from_bits(r, d, as_mlx) for r, d in zip(results, dtypes, strict=True)]
        assert self.last is not None
        return Outputs(values, self.last)

    def registers(
        self,
        *,
        inputs: list[Any],
        output_dtypes: list[Any],
        threadgroup: tuple[int, int, int],
        template: list[tuple[str, Any]] | None = None,
        **_: Any,
    ) -> Registers:
        """For the same arguments as a call: registers on another GPU, to rank designs by."""
        bits = [arrays.bits_of(x) for x in inputs]
        dtypes = [arrays.dtype_name(d) for d in output_dtypes]
        threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
        _, parts = self._text(bits, dtypes, template or [], threads)
        return measure(whole_text(parts, tuple(self.function_constants.items()))[0])

    def _text(
        self,
        bits: list[tuple[np.ndarray, str]],
        dtypes: list[str],
        template: list[tuple[str, Any]],
        amd_threads: int = 0,
    ) -> tuple[list[sig.Parameter], tuple[str, str, str, str]]:
        params = sig.parameters(
            self.source,
            [(n, d, b.shape) for n, (b, d) in zip(self.input_names, bits, strict=True)],
            list(zip(self.output_names, dtypes, strict=True)),
            self.atomic_outputs,
        )
        function = sig.function_name(self.name, template)
        signature = sig.signature(function, self.source, params, template)
        entry = sig.entry(function, self.source, params, template, amd_threads)
        return params, (self.header, signature, self.source, entry)

    def _check_call(self, inputs, output_shapes, output_dtypes, grid, threadgroup) -> None:
        for what, got, names in (
            ("inputs", inputs, self.input_names),
            ("output_shapes", output_shapes, self.output_names),
            ("output_dtypes", output_dtypes, self.output_names),
        ):
            if len(got) != len(names):
                raise ValueError(f"{self.name}: {what} has {len(got)} entries for names {names}")
        if min(*grid, *threadgroup) < 1:
            raise ValueError(f"{self.name}: grid {grid} and threadgroup {threadgroup} must be >= 1")
        if (n := threadgroup[0] * threadgroup[1] * threadgroup[2]) > 1024:
            raise ValueError(f"{self.name}: {n} threads in a threadgroup; Metal has 1024 at most")

    def _run(self, compiled, params, bits, results, grid, threadgroup, initialised) -> None:
        lib = compiled.lib
        lib.em_reset()
        args = (ctypes.c_uint64 * (len(params) + 1))()
        memory: list[tuple[np.ndarray, int, bool]] = []
        inputs, outputs = iter(bits), iter(results)
        array = np.empty(0)
        for p in params:
            if p.source == "input":
                array = next(inputs)[0]
                if self.ensure_row_contiguous and not array.flags.c_contiguous:
                    array = np.ascontiguousarray(array)
                flags = WRITABLE | INITIALISED if p.name in self.in_place else 0
                memory.append((_span(array), flags, True))
            elif p.source == "output":
                flags = WRITABLE | (INITIALISED if initialised else 0)
                memory.append((next(outputs), flags, initialised))
            else:
                memory.append((_shape_info(array, p.source), 0, True))
        for i, (data, flags, copy) in enumerate(memory):
            address = lib.em_buffer(data.nbytes, flags, data.ctypes.data if copy else None)
            if address is None:
                raise MemoryError(f"{self.name}: the emulator's arena is full")
            args[i] = address
        order = self.order or settings.order
        seed = settings.seed if self.seed is None else self.seed
        compiled.launch(args, grid, threadgroup, order, seed)
        names = [p.name for p in params]
        report = compiled.findings(names)
        for i, (data, flags, _) in enumerate(memory):
            if not flags & WRITABLE:
                continue
            ctypes.memmove(data.ctypes.data, args[i], data.nbytes)
            first = ctypes.c_uint64()
            missing = lib.em_unwritten(i, ctypes.byref(first))
            if missing and not report:  # a run that was stopped says nothing about outputs
                each = data.itemsize
                text = f"{missing // each} of {data.size} elements of {names[i]} were never written"
                text += f", the first at {first.value // each}"
                report.append(Finding("unwritten output", "?", text, names[i], first.value))
        counters = compiled.counters(names, [p.source for p in params])
        self.last = Launch(self.name, grid, threadgroup, report, counters)
        if settings.launches is not None:
            settings.launches.append(self.last)
        if report and (settings.check if self.check is None else self.check):
            raise MetalError(self.name, report)


def _span(array: np.ndarray) -> np.ndarray:
    """The memory that a (perhaps strided) array covers, as bytes in order."""
    if array.flags.c_contiguous:
        return array
    if any(s < 0 for s in array.strides):
        raise ValueError("negative strides")
    items = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    count = items // array.itemsize + 1
    flat = np.lib.stride_tricks.as_strided(array, (count,), (array.itemsize,))
    return np.array(flat)


def _shape_info(array: np.ndarray, what: str) -> np.ndarray:
    if what == "shape":
        return np.array(array.shape, np.int32)
    if what == "strides":
        return np.array([s // array.itemsize for s in array.strides], np.int64)
    return np.array([array.ndim], np.int32)


def _filled(shape: tuple[int, ...], dtype: str, value: float) -> np.ndarray:
    if dtype == "bfloat16":
        return arrays.Bfloat16.of(np.full(shape, value, np.float32)).bits
    return np.full(shape, value, np.dtype(dtype))
