"""The few calls of NVIDIA's driver and run-time compiler that MLX has no door to, through ctypes.

Both libraries are in the process already: MLX links them. Sources: CUDA Driver API and NVRTC
reference manuals, 12 and later.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Any

from qrun.errors import BackendError

if TYPE_CHECKING:
    from qrun.ops._cuda_launch import Kernel, Plan

COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
MULTIPROCESSORS = 16
SHARED_OF_SM = 81  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
SHARED_PERCENT = 44  # of an SM's memory: what streams through L1 wants the rest
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
NOT_READY = 600  # CUDA_ERROR_NOT_READY
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


# Held by the thread that launches: arguments lie in memory that all threads share (see Ready), and
# the GIL is free while the driver reads them.
LOCK = threading.RLock()

# Whether a kernel may start while the one before still runs (programmatic dependent launch). It
# must then wait by itself before it touches what that one writes or reads.
EARLY = True


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value in a union of 64 bytes."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_int * 15))


_EARLY = ctypes.pointer(_Attribute(PROGRAMMATIC_SERIALIZATION, 0, 1))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", c_uint),
    )


@cache
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any, but: int = 0) -> int:
    """Call a function of the driver -> its status, 0 or `but`.

    Raises BackendError with the function's name and what the driver says.
    """
    status = getattr(_cuda(), name)(*arguments)
    if status not in (0, but):
        text = c_char_p()
        _cuda().cuGetErrorString(status, byref(text))
        what = text.value.decode() if text.value else f"error {status}"
        raise BackendError(f"CUDA: {name}: {what}")
    return status


@cache
def context() -> c_void_p:
    """The device's primary context, which MLX uses too."""
    device, held = c_int(), c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", byref(device), 0)
    call("cuDevicePrimaryCtxRetain", byref(held), device)
    return held


def enter() -> None:
    """Make the context this thread's."""
    call("cuCtxSetCurrent", context())


@cache
def compute_capability() -> tuple[int, int]:
    """For instance (9, 0)."""
    major, minor = (_attribute(which) for which in COMPUTE_CAPABILITY)
    return major, minor


@cache
def multiprocessors() -> int:
    """How many SMs the device has."""
    return _attribute(MULTIPROCESSORS)


@cache
def shared_memory() -> int:
    """Bytes of shared memory that the blocks of an SM have together, 1 KB of each being the
    system's.
    """
    return _attribute(SHARED_OF_SM)


def _attribute(which: int) -> int:
    context()
    device, value = c_int(), c_int()
    call("cuDeviceGet", byref(device), 0)
    call("cuDeviceGetAttribute", byref(value), which, device)
    return value.value


_functions: dict[str, c_void_p] = {}  # by name


def loaded(kernel: Kernel) -> bool:
    """Whether it can be launched at once."""
    return kernel.name in _functions


def function(kernel: Kernel) -> c_void_p:
    """The kernel on the device, loaded once, allowed all its shared memory."""
    found = _functions.get(kernel.name)
    if found is None:
        enter()
        module, found = c_void_p(), c_void_p()
        call("cuModuleLoadData", byref(module), kernel.cubin)
        call("cuModuleGetFunction", byref(found), module, kernel.name.encode())
        if kernel.shape.shared > 48 * 1024:
            call("cuFuncSetAttribute", found, MAX_DYNAMIC_SHARED, kernel.shape.shared)
        # Kernels can share an SM, and so start early, where they cut its memory alike. For those
        # that need more, what the driver takes is better than any wish.
        needed = kernel.shape.blocks * (kernel.shape.shared + 1024)
        if needed <= shared_memory() * SHARED_PERCENT / 100:
            call("cuFuncSetAttribute", found, PREFERRED_CARVEOUT, SHARED_PERCENT)
        _functions[kernel.name] = found
    return found


class Ready:
    """A kernel with all of its launch but the pointers: ctypes takes longer to make such things
    than to fill them in.
    """

    def __init__(self, kernel: Kernel, grid: Sequence[int], pointers: int, numbers: Sequence[int]):
        shape, count = kernel.shape, pointers + len(numbers)
        # An int takes the lower half of its eight bytes.
        self.values = (c_uint64 * count)(*[0] * pointers, *numbers)
        at = ctypes.addressof(self.values)
        addresses = (c_void_p * count)(*range(at, at + 8 * count, 8))
        early = int(EARLY)
        self.config = _Config(grid, (shape.threads, 1, 1), shape.shared, None, _EARLY, early)
        self.arguments = byref(self.config), function(kernel), addresses, None


class Stream:
    """A stream of our own; work on it is not ordered against MLX's but by waiting."""

    def __init__(self) -> None:
        enter()
        self.handle = c_void_p()
        call("cuStreamCreate", byref(self.handle), STREAM_NON_BLOCKING)

    def wait(self) -> None:
        """Until all of it is done."""
        call("cuStreamSynchronize", self.handle)

    def destroy(self) -> None:
        """Free it."""
        call("cuStreamDestroy_v2", self.handle)

    def launch(self, plan: Plan, pointers: Sequence[int]) -> None:
        """One kernel; its arguments are device pointers, then ints."""
        ready = plan.ready
        ready.config.stream = self.handle
        ready.values[: len(pointers)] = pointers
        call("cuLaunchKernelEx", *ready.arguments)


@cache
def stream() -> Stream:
    """The one that all of our own launches run on, in their order."""
    return Stream()


class Graph:
    """What is launched on its `stream` until `end`, replayed as a whole."""

    def __init__(self) -> None:
        self.stream, self._handle = Stream(), c_void_p()
        call("cuStreamBeginCapture_v2", self.stream.handle, CAPTURE_THREAD_LOCAL)

    def end(self) -> None:
        """Stop recording, make it ready to run."""
        graph = c_void_p()
        call("cuStreamEndCapture", self.stream.handle, byref(graph))
        call("cuGraphInstantiateWithFlags", byref(self._handle), graph, c_ulonglong(0))
        call("cuGraphDestroy", graph)
        self.stream.destroy()

    def launch(self, stream: Stream) -> None:
        """Enqueue all of it."""
        call("cuGraphLaunch", self._handle, stream.handle)

    def destroy(self) -> None:
        """Free it; it must not run any more."""
        call("cuGraphExecDestroy", self._handle)


class Pinned:
    """Bytes of host memory that the device copies from and to without a detour."""

    def __init__(self, size: int) -> None:
        enter()
        pointer = c_void_p()
        call("cuMemHostAlloc", byref(pointer), c_size_t(size), 0)
        assert pointer.value is not None
        self.address, self.size = pointer.value, size

    def part(self, address: int, size: int) -> memoryview:
        """Some of the bytes, to read and write."""
        return memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    def free(self) -> None:
        """Give them back."""
        call("cuMemFreeHost", c_void_p(self.address))


def to_device(stream: Stream, device: int, host: int, size: int) -> None:
    """Enqueue a copy of `size` bytes from pinned host memory."""
    call(
        "cuMemcpyHtoDAsync_v2",
        c_uint64(device),
        c_void_p(host),
        c_size_t(size),
        stream.handle,
    )


def send(stream: Stream, device: int, data: bytes) -> None:
    """Enqueue a copy from any host memory; what of it is needed later is taken at once."""
    call("cuMemcpyHtoDAsync_v2", c_uint64(device), data, c_size_t(len(data)), stream.handle)


def to_host(stream: Stream, host: int, device: int, size: int) -> None:
    """Enqueue a copy of `size` bytes into pinned host memory."""
    call(
        "cuMemcpyDtoHAsync_v2",
        c_void_p(host),
        c_uint64(device),
        c_size_t(size),
        stream.handle,
    )


def on_device(stream: Stream, to: int, origin: int, size: int) -> None:
    """Enqueue a copy of `size` bytes within the device."""
    call(
        "cuMemcpyDtoDAsync_v2",
        c_uint64(to),
        c_uint64(origin),
        c_size_t(size),
        stream.handle,
    )


class Event:
    """A point in a stream that the host can wait for."""

    def __init__(self) -> None:
        enter()
        self._handle = c_void_p()
        call("cuEventCreate", byref(self._handle), EVENT_DISABLE_TIMING)

    def record(self, stream: Stream) -> None:
        """Here."""
        call("cuEventRecord", self._handle, stream.handle)

    def wait(self) -> None:
        """Until the stream has come this far."""
        call("cuEventSynchronize", self._handle)

    def done(self) -> bool:
        """Whether it has."""
        return call("cuEventQuery", self._handle, but=NOT_READY) == 0

    def destroy(self) -> None:
        """Free it."""
        call("cuEventDestroy_v2", self._handle)
