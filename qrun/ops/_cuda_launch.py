"""Launching one function of kernels/: the only caller of MLX's CUDA kernels.

The source that MLX compiles at run time is an `#include` of the file and one call. It must stay
short: MLX builds and hashes it at every evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from qrun import paths
from qrun.ops.matrix import QuantizedMatrix

MICRO = {"mxfp4": 0, "nvfp4": 1, "mxfp8": 2}  # enum Micro of common/dequantize.cuh
Constant = bool | int | mx.Dtype


@dataclass(frozen=True)
class Shape:
    """Threads a block, blocks an SM shall hold at least, bytes of shared memory."""

    threads: int
    blocks: int = 1
    shared: int = 0


@cache
def _kernel(
    file: str, names: tuple[str, ...], outputs: tuple[str, ...], source: str, shape: Shape
) -> Any:
    # MLX has no argument for launch bounds, so the header ends by putting them into the keyword.
    header = (
        f'#include "{paths.KERNELS / file}"\n'
        "#undef __global__\n"
        "#define __global__ __attribute__((global)) "
        f"__launch_bounds__({shape.threads}, {shape.blocks})\n"
    )
    # MLX raises the limit of shared memory once for each name: the size is part of it.
    name = f"qrun_{file.rsplit('/', 1)[-1].removesuffix('.cuh')}_{shape.shared}"
    return mx.fast.cuda_kernel(
        name=name,
        input_names=list(names),
        output_names=list(outputs),
        source=source,
        header=header,
        shared_memory=shape.shared,
    )


def launch(
    file: str,
    source: str,
    inputs: dict[str, mx.array | None],
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
    constants: dict[str, Constant],
    grid: tuple[int, int, int],
    shape: Shape,
) -> list[mx.array]:
    """Run `source`, one statement or two, over `grid` blocks.

    inputs by name; None is left out, and the source says nullptr. outputs: name to (shape, dtype).
    """
    given = {name: array for name, array in inputs.items() if array is not None}
    kernel = _kernel(file, tuple(given), tuple(outputs), source, shape)
    return kernel(
        inputs=list(given.values()),
        output_shapes=[s for s, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        template=list(constants.items()),
        grid=(grid[0] * shape.threads, grid[1], grid[2]),
        threadgroup=(shape.threads, 1, 1),
    )


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


def scheme_of(m: QuantizedMatrix, k: str) -> tuple[str, dict[str, Constant]]:
    """The C++ expression of a matrix of any format, and its constants."""
    if m.spec.mode != "affine":
        return f"qrun::MicroScaled<MODE>{{w, scales, {k}}}", {"MODE": MICRO[m.spec.mode]}
    return (
        f"qrun::Affine<S, BITS, GROUP>{{w, scales, biases, {k}}}",
        {"S": m.scale_dtype, "BITS": m.spec.bits, "GROUP": m.spec.group_size},
    )
