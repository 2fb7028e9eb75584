"""`metal_kernel`: the call of `mx.fast.metal_kernel`, run here.

    kernel = metal_kernel(name, input_names, output_names, source, header=...)
    outputs = kernel(inputs=..., output_shapes=..., output_dtypes=..., grid=..., threadgroup=...)

Outputs start as NaN bytes (0xff). A launch with findings raises `MetalError` unless `check=False`.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.metal import arrays
from tests.metal import signature as sig
from tests.metal.compiled import Counters, compile_parts, lint_source, whole_text
from tests.metal.registers import Registers, measure
from tests.metal.report import Finding, MetalError

WRITABLE, INITIALISED = 1, 2


@dataclass
class Settings:
    """How launches run, unless a kernel says otherwise; change with `settings.use(...)`."""

    order: str = "forward"  # in which threads and threadgroups run; or "backward", "random"
    seed: int = 0  # of the random order
    check: bool = True  # raise MetalError when a launch has findings
    lint: bool = True  # refuse what Metal refuses and clang accepts
    literal: bool = False  # compile at -O0: slower, every access as the source has it
    seconds: int = 60  # of processor time; a launch that takes longer is called endless
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
        kinds = [arrays.kind_of(x) for x in inputs]
        params, parts = self._text(kinds, dtypes, template)
        if verbose:
            print("".join(parts[:3]) + "\n}\n")
        if settings.lint if self.lint is None else self.lint:
            lint_source(self.header, self.source)
        compiled = compile_parts(parts, tuple(self.function_constants.items()), settings.literal)

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
        kinds = [arrays.kind_of(x) for x in inputs]
        dtypes = [arrays.dtype_name(d) for d in output_dtypes]
        threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
        parts = self._text(kinds, dtypes, template or [], threads)[1]
        return measure(whole_text(parts, tuple(self.function_constants.items()))[0])

    def text(
        self,
        *,
        inputs: list[Any],
        output_dtypes: list[Any],
        template: list[tuple[str, Any]] | None = None,
        **_: Any,
    ) -> str:
        """For the same arguments as a call: header, signature, body, as MLX puts them together."""
        dtypes = [arrays.dtype_name(d) for d in output_dtypes]
        parts = self._text([arrays.kind_of(x) for x in inputs], dtypes, template or [])[1]
        return "".join(parts[:3]) + "\n}\n"

    def _text(
        self,
        kinds: list[tuple[str, tuple[int, ...]]],
        dtypes: list[str],
        template: list[tuple[str, Any]],
        amd_threads: int = 0,
    ) -> tuple[list[sig.Parameter], tuple[str, str, str, str]]:
        params = sig.parameters(
            self.source,
            [(n, *kind) for n, kind in zip(self.input_names, kinds, strict=True)],
            list(zip(self.output_names, dtypes, strict=True)),
            self.atomic_outputs,
        )
        function = sig.function_name(self.name, template, kinds, dtypes)
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
                if p.name in self.in_place and not array.flags.c_contiguous:
                    raise ValueError(f"{self.name}: {p.name} is in_place and not contiguous")
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
        compiled.launch(args, grid, threadgroup, order, seed, settings.seconds)
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
