"""A Metal kernel as data: the arguments of mx.fast.metal_kernel and of its call.

The text of a kernel is its .metal file with our own includes put in once (Metal's run-time compiler
takes no paths); the body is one call of it. Shapes travel as MLX's x_shape, w_shape, so a kernel is
compiled once per types and geometry; constants of a model (eps, scale, window) are in the body.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import mlx.core as mx

from qrun.paths import KERNELS

Value = mx.Dtype | int | bool  # of a template argument


@dataclass(frozen=True)
class Kernel:
    """The arguments of mx.fast.metal_kernel."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str


@dataclass(frozen=True)
class Call:
    """A kernel and the arguments of its call."""

    kernel: Kernel
    inputs: tuple[mx.array, ...]
    template: tuple[tuple[str, Value], ...]
    grid: tuple[int, int, int]  # in threads
    threadgroup: tuple[int, int, int]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]
    in_place: tuple[str, ...] = ()  # inputs that the kernel writes into, against their const


Run = Callable[[Call], Sequence[mx.array]]


@cache
def header(file: str) -> str:
    """A kernel's text, e.g. "qmm/qmm.metal", complete; #line keeps messages at the real places.

    Without comments and indentation: MLX hashes the whole text whenever it launches a kernel.
    """
    included: set[Path] = set()

    def text(path: Path) -> str:
        if path in included:
            return ""
        included.add(path)
        name = path.relative_to(KERNELS)
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'#include "(.+)"', line)
            if match:
                lines += [text((path.parent / match[1]).resolve()), f'#line {number + 1} "{name}"']
            else:
                lines.append(line.split("//")[0].strip())
        return "\n".join(lines)

    return text((KERNELS / file).resolve()) + "\n"


@cache
def _compiled(kernel: Kernel) -> Callable[..., list[mx.array]]:
    compiled = mx.fast.metal_kernel(
        name=kernel.name,
        input_names=kernel.input_names,
        output_names=kernel.output_names,
        source=kernel.source,
        header=kernel.header,
        compile_options={"math_mode": "fast"},
    )
    return cast("Callable[..., list[mx.array]]", compiled)


def launch(call: Call) -> Sequence[mx.array]:
    return _compiled(call.kernel)(
        inputs=list(call.inputs),
        template=list(call.template),
        grid=call.grid,
        threadgroup=call.threadgroup,
        output_shapes=list(call.output_shapes),
        output_dtypes=list(call.output_dtypes),
    )


def call(
    name: str,
    file: str,
    source: str,
    inputs: dict[str, mx.array],
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
    template: dict[str, Value],
    grid: tuple[int, int, int],  # threads in all
    threads: int,  # in a threadgroup, along x
    in_place: tuple[str, ...] = (),
) -> Call:
    # MLX keeps one compiled text per name and template, so bodies that differ differ in name.
    name = f"qrun_{name}_{zlib.crc32((source + ','.join(inputs)).encode()):08x}"
    return Call(
        Kernel(name, tuple(inputs), tuple(outputs), source, header(file)),
        tuple(inputs.values()),
        tuple(template.items()),
        grid,
        (threads, 1, 1),
        tuple(shape for shape, _ in outputs.values()),
        tuple(dtype for _, dtype in outputs.values()),
        in_place,
    )


def literal(value: float) -> str:
    """value as Metal writes it. Fast math counts on finite numbers, and inf has no literal."""
    if not math.isfinite(value):
        raise ValueError(f"{value} in a kernel: only finite numbers can be there")
    return f"{float(value)!r}f"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
