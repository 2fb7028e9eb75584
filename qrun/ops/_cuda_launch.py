"""Launching one function of kernels/: every CUDA kernel of qrun goes through `launch`.

    op --recipe, asked once--> plan --runner--> results

A prompt is hundreds of launches, asked for one by one while the GPU waits. So what depends on no
more than shapes, dtypes and numbers is worked out once: an op gives a function for it, a recipe.
A kernel is a translation unit of an `#include` and one call. It is compiled once and kept on disk
(_cuda_compile.py). Who runs it can be exchanged: MLX, op by op, or a program that records a whole
step (_cuda_program.py), or whoever launches a prompt (_cuda_direct.py), or a test.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from qrun.ops import _cuda_driver as driver
from qrun.ops.matrix import QuantizedMatrix
from qrun.quantization import Quantization

MICRO = {"mxfp4": 0, "nvfp4": 1, "mxfp8": 2}  # enum Micro of common/dequantize.cuh
Constant = bool | int | mx.Dtype
ACTIVATIONS = {None: 0, "swiglu": 1, "geglu": 2}  # enum Activation of common/epilogue.cuh
TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint64: "unsigned long long",
    mx.uint32: "unsigned",
    mx.int32: "int",
    mx.uint8: "unsigned char",
}


@dataclass(frozen=True)
class Shape:
    """Threads a block, blocks an SM shall hold at least, bytes of shared memory; blocks along x
    that form a cluster.
    """

    threads: int
    blocks: int = 1
    shared: int = 0
    cluster: int = 1


@dataclass(frozen=True)
class Kernel:
    """A function of CUDA C++ under its own name; arguments: inputs, outputs, then ints."""

    label: str  # of what, for people
    name: str
    text: str
    shape: Shape

    @cached_property
    def cubin(self) -> bytes:
        """Machine code for this GPU."""
        from qrun.ops._cuda_compile import compiled

        return compiled(self.text)


Output = tuple[tuple[int, ...], mx.Dtype]
Grid = tuple[int, int, int]


class Recipe(NamedTuple):
    """What an op launches: a `source` of one statement or two, over `grid` blocks.

    It may say `x_shape[0]` of an input x. outputs: name to (shape, dtype).
    """

    file: str
    source: str
    outputs: dict[str, Output]
    constants: dict[str, Constant]
    grid: Grid
    shape: Shape


@dataclass(frozen=True, eq=False)
class Plan:
    """A launch of which all is known but where its arrays lie. grid: in blocks."""

    kernel: Kernel
    inputs: int  # how many
    outputs: list[Output]
    numbers: list[int]
    grid: Grid

    @cached_property
    def ready(self) -> driver.Ready:
        """For the driver. The kernel is on the device then."""
        pointers = self.inputs + len(self.outputs)
        return driver.Ready(self.kernel, self.grid, pointers, self.numbers)


Runner = Callable[[Plan, list[mx.array]], list[mx.array]]  # inputs -> results


def by_mlx(plan: Plan, inputs: list[mx.array]) -> list[mx.array]:
    """The kernel as an op of MLX's graph."""
    kernel, grid = plan.kernel, plan.grid
    threads = kernel.shape.threads
    return mx.fast.precompiled_cuda_kernel(
        name=kernel.name,
        compiled_source=kernel.cubin,
        inputs=inputs,
        output_shapes=[shape for shape, _ in plan.outputs],
        output_dtypes=[dtype for _, dtype in plan.outputs],
        scalars=cast(Any, plan.numbers),
        grid=(grid[0] * threads, grid[1], grid[2]),
        threadgroup=(threads, 1, 1),
        shared_memory=kernel.shape.shared,
        ensure_row_contiguous=True,
    )


class _Here(threading.local):
    """What holds for this thread: others go on as they were."""

    def __init__(self) -> None:
        self.runner: Runner = by_mlx


_here = _Here()


@contextmanager
def run_by(runner: Runner) -> Generator[None]:
    """Within it, `runner` gets what this thread launches."""
    before, _here.runner = _here.runner, runner
    try:
        yield
    finally:
        _here.runner = before


_plans: dict[Any, Plan] = {}
MOST_PLANS = 4096  # every length of a prompt has its own


def launch(
    recipe: Callable[..., Recipe], inputs: dict[str, mx.array | None], *fixed: Hashable
) -> list[mx.array]:
    """Run recipe(*fixed, **inputs), which may look at no more of an input than shape and dtype:
    it is asked once for all that are alike.

    inputs: in the order of the kernel's parameters; None is left out, and the source says nullptr.
    """
    arrays = inputs.values()
    key = (recipe, fixed, *[None if a is None else (a.shape, a.dtype) for a in arrays])
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) == MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _planned(recipe(*fixed, **inputs), inputs)
    return _here.runner(plan, [a for a in arrays if a is not None])


def _planned(recipe: Recipe, inputs: dict[str, mx.array | None]) -> Plan:
    given = {name: array for name, array in inputs.items() if array is not None}
    kernel, axes = _kernel(
        recipe.file,
        recipe.source,
        tuple((name, array.dtype) for name, array in given.items()),
        tuple((name, dtype) for name, (_, dtype) in recipe.outputs.items()),
        tuple(recipe.constants.items()),
        recipe.shape,
    )
    numbers = [given[name].shape[axis] for name, axis in axes]
    return Plan(kernel, len(given), [*recipe.outputs.values()], numbers, recipe.grid)


@cache
def _kernel(
    file: str,
    source: str,
    inputs: tuple[tuple[str, mx.Dtype], ...],
    outputs: tuple[tuple[str, mx.Dtype], ...],
    constants: tuple[tuple[str, Constant], ...],
    shape: Shape,
) -> tuple[Kernel, list[tuple[str, int]]]:
    """The kernel, and the axes of inputs that are its numbers."""
    shapes = sorted(set(re.findall(r"\b(\w+)_shape\[(\d)\]", source)))
    parameters = [f"const {TYPES[dtype]}* {name}" for name, dtype in inputs]
    parameters += [f"{TYPES[dtype]}* {name}" for name, dtype in outputs]
    parameters += [f"int {name}_shape_{axis}" for name, axis in shapes]
    fixed = "".join(
        f"  using {name} = {TYPES[value]};\n"
        if isinstance(value, mx.Dtype)
        else f"  constexpr int {name} = {int(value)};\n"
        for name, value in constants
    )
    body = re.sub(r"\b(\w+)_shape\[(\d)\]", r"\1_shape_\2", source)
    stem = file.rsplit("/", 1)[-1].removesuffix(".cuh")
    cluster = f"__cluster_dims__({shape.cluster}, 1, 1) " if shape.cluster > 1 else ""
    signature = (
        f"{cluster}__launch_bounds__({shape.threads}, {shape.blocks})\n"
        f"NAME({', '.join(parameters)}) {{\n{fixed}  {body}\n}}\n"
    )
    # The size of shared memory is part of the name: MLX raises its limit once for each name.
    key = hashlib.sha256(f"{file} {shape.shared} {signature}".encode()).hexdigest()[:16]
    name = f"qrun_{stem}_{key}"
    text = f'#include "{file}"\n\nextern "C" __global__ void {signature.replace("NAME", name, 1)}'
    types = [f"{n}={TYPES[v] if isinstance(v, mx.Dtype) else v}" for n, v in constants]
    return Kernel(" ".join([stem, *types]), name, text, shape), [(n, int(a)) for n, a in shapes]


def alone() -> bool:
    """Whether MLX stays out of it. It updates a CUDA graph of the same form in place, which does
    not change the size of a kernel's clusters: such kernels are not for MLX to launch.
    """
    return _here.runner is not by_mlx


def after(arrays: list[mx.array], first: mx.array) -> list[mx.array]:
    """The same arrays, written in place by the launch that made `first`."""
    if _here.runner is not by_mlx:  # launches run in the order of the calls
        return arrays
    return mx.depends(arrays, [first])


def pointer(name: str, array: mx.array | None, kind: str) -> str:
    """An optional input in a source: its name, or a null of its type."""
    return name if array is not None else f"static_cast<const {kind}*>(nullptr)"


def literal(value: float) -> str:
    """A float32 constant, exact: CUDA C++ reads hexadecimal."""
    return f"{float(np.float32(value)).hex()}f"


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def matrix(m: QuantizedMatrix) -> dict[str, mx.array | None]:
    if m.w is None or m.scales is None:
        raise ValueError("this matrix was packed for another backend")
    return {"w": m.w, "scales": m.scales, "biases": m.biases}


def scheme_of(spec: Quantization, scales: mx.Dtype, k: str) -> tuple[str, dict[str, Constant]]:
    """The C++ expression of a matrix of any format, and its constants."""
    if spec.mode != "affine":
        return f"qrun::MicroScaled<MODE>{{w, scales, {k}}}", {"MODE": MICRO[spec.mode]}
    return (
        f"qrun::Affine<S, BITS, GROUP>{{w, scales, biases, {k}}}",
        {"S": scales, "BITS": spec.bits, "GROUP": spec.group_size},
    )


def epilogue_of(
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
    n: str = "w_shape[0]",
) -> tuple[str, dict[str, Constant]]:
    """The C++ expression of what follows a product, and its constants. n: rows of w."""
    return (
        f"qrun::Epilogue<T, B, ACTIVATION>{{y, {pointer('bias', bias, 'B')}, "
        f"{pointer('residual', residual, 'T')}, {literal(scale)}, {n}}}",
        {
            "B": mx.float32 if bias is None else bias.dtype,
            "ACTIVATION": ACTIVATIONS[activation],
        },
    )
