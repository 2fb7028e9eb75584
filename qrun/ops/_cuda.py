"""The ops as CUDA kernels, for compute capability 8.0 and later."""

from __future__ import annotations

import mlx.core as mx

from qrun.ops import _mlx
from qrun.ops._cuda_product import qmm, qmv
from qrun.ops._cuda_program import traced
from qrun.ops._cuda_rows import argmax, embedding, rms_norm, rope, sdpa, swiglu
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.sample import on_device
from qrun.quantization import Quantization

__all__ = [
    "NAME",
    "QMV_ROWS",
    "argmax",
    "embedding",
    "gemm",
    "has_kernel",
    "pack",
    "qmm",
    "qmv",
    "rms_norm",
    "rope",
    "sample",
    "sdpa",
    "swiglu",
    "traced",
]

NAME = "cuda"
QMV_ROWS = 16

sample = on_device
gemm = _mlx.gemm


def has_kernel(spec: Quantization) -> bool:
    return True


def pack(m: QuantizedMatrix) -> mx.array | None:
    return None
