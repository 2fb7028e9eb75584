"""Metal kernels, compiled and run on Linux. See README.md."""

from tests.metal.arrays import Bfloat16
from tests.metal.clang import CompileError
from tests.metal.compiled import Counters
from tests.metal.kernel import Launch, Outputs, metal_kernel, settings
from tests.metal.report import Finding, MetalError

__all__ = [
    "Bfloat16",
    "CompileError",
    "Counters",
    "Finding",
    "Launch",
    "MetalError",
    "Outputs",
    "metal_kernel",
    "settings",
]
