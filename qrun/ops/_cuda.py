"""The ops as CUDA kernels, for compute capability 8.0 and later."""

from __future__ import annotations

import mlx.core as mx

from qrun.ops._cuda_attend import attend
from qrun.ops._cuda_direct import once
from qrun.ops._cuda_mixture import combine, gather_qmm, route
from qrun.ops._cuda_product import gemm, qmm, qmv
from qrun.ops._cuda_program import traced
from qrun.ops._cuda_rows import (
    argmax,
    embedding,
    rms_norm,
    rms_norm_parts,
    rope,
    softcap,
    swiglu,
)
from qrun.ops._cuda_sdpa import sdpa
from qrun.ops._launch import zeros
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.sample import on_device

__all__ = [
    "GATHERS",
    "NAME",
    "PREFILL_ROWS",
    "QMV_ROWS",
    "argmax",
    "attend",
    "blank",
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
GATHERS = True

sample = on_device
blank = zeros


def pack(m: QuantizedMatrix, count: int) -> mx.array | None:
    return None
