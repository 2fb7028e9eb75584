"""One file an op: its contract, its float64 reference, the bytes it must move, its launch."""

from qrun.ops.argmax import argmax
from qrun.ops.attend import attend
from qrun.ops.combine import combine
from qrun.ops.embedding import embedding
from qrun.ops.gather_qmm import gather_qmm
from qrun.ops.gemm import gemm
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.qmm import qmm
from qrun.ops.qmv import qmv
from qrun.ops.rms_norm import rms_norm, rms_norm_parts
from qrun.ops.rope import rope
from qrun.ops.route import Routes, route
from qrun.ops.sample import sample
from qrun.ops.sdpa import sdpa
from qrun.ops.softcap import softcap
from qrun.ops.swiglu import swiglu

__all__ = [
    "QuantizedMatrix",
    "Routes",
    "argmax",
    "attend",
    "combine",
    "embedding",
    "gather_qmm",
    "gemm",
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
]
