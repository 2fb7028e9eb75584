"""The ops as CUDA kernels, for compute capability 8.0 and later."""

from __future__ import annotations

import mlx.core as mx

from qrun.ops import _mlx
from qrun.ops._cuda_attend import attend
from qrun.ops._cuda_product import qmm, qmv
from qrun.ops._cuda_program import once, traced
from qrun.ops._cuda_rows import argmax, embedding, rms_norm, rope, sdpa, swiglu
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.sample import on_device

__all__ = [
    "GATHERS",
    "NAME",
    "PREFILL_ROWS",
    "QMV_ROWS",
    "argmax",
    "attend",
    "combine",
    "embedding",
    "gather_qmm",
    "gemm",
    "once",
    "pack",
    "qmm",
    "qmv",
    "rms_norm",
    "rms_norm_parts",
    "rope",
    "route",
    "sample",
    "sdpa",
    "softcap",
    "swiglu",
    "traced",
]

NAME = "cuda"
QMV_ROWS = 8
PREFILL_ROWS = 2048
GATHERS = False

sample = on_device
gemm = _mlx.gemm
gather_qmm = _mlx.gather_qmm
route = _mlx.route
combine = _mlx.combine
rms_norm_parts = _mlx.rms_norm_parts
softcap = _mlx.softcap


def pack(m: QuantizedMatrix, count: int) -> mx.array | None:
    return None
