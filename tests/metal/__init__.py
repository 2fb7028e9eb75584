"""Metal kernels, compiled and run on Linux. See README.md."""

from tests.metal.kernel import Launch, Outputs, metal_kernel, settings
from tests.metal.report import Finding, MetalError

__all__ = ["Finding", "Launch", "MetalError", "Outputs", "metal_kernel", "settings"]
