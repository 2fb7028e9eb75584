"""The ops as CUDA kernels, for compute capability 8.0 and later."""

from __future__ import annotations

import mlx.core as mx

from qrun.ops import _mlx
from qrun.ops._cuda_product import qmm, qmv
from qrun.ops._cuda_rows import argmax, embedding, rms_norm, rope, sdpa, swiglu
from qrun.ops._launch import Step
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.sample import on_device
from qrun.quantization import Quantization

__all__ = [
    "NAME",
    "QMV_ROWS",
    "argmax",
    "combine",
    "embedding",
    "gather_qmm",
    "gemm",
    "has_expert_kernel",
    "has_kernel",
    "pack",
    "qmm",
    "qmv",
    "rms_norm",
    "rope",
    "route",
    "sample",
    "sdpa",
    "swiglu",
    "traced",
]

NAME = "cuda"
QMV_ROWS = 16

sample = on_device
gemm = _mlx.gemm
gather_qmm = _mlx.gather_qmm
route = _mlx.route
combine = _mlx.combine


def has_kernel(spec: Quantization) -> bool:
    return True


def has_expert_kernel(spec: Quantization) -> bool:
    return False


def traced(step: Step) -> Step:
    return mx.compile(step)


def pack(m: QuantizedMatrix, count: int) -> mx.array | None:
    return None
