"""The few calls of NVIDIA's driver and run-time compiler that MLX has no door to, through ctypes.

Both libraries are in the process already: MLX links them. Sources: CUDA Driver API and NVRTC
reference manuals, 12 and later.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

from qrun.errors import BackendError

COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value in a union of 64 bytes."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_int * 15))


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


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises BackendError with its name and what the driver says."""
    status = getattr(_cuda(), name)(*arguments)
    if status:
        text = c_char_p()
        _cuda().cuGetErrorString(status, byref(text))
        what = text.value.decode() if text.value else f"error {status}"
        raise BackendError(f"CUDA: {name}: {what}")


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
    context()
    device, values = c_int(), (c_int(), c_int())
    call("cuDeviceGet", byref(device), 0)
    for value, which in zip(values, COMPUTE_CAPABILITY, strict=True):
        call("cuDeviceGetAttribute", byref(value), which, device)
    return values[0].value, values[1].value


@cache
def function(cubin: bytes, name: str, shared: int) -> c_void_p:
    """A kernel of a compiled module, loaded once, allowed `shared` bytes of shared memory."""
    enter()
    module, found = c_void_p(), c_void_p()
    call("cuModuleLoadData", byref(module), cubin)
    call("cuModuleGetFunction", byref(found), module, name.encode())
    if shared > 48 * 1024:
        call("cuFuncSetAttribute", found, MAX_DYNAMIC_SHARED, shared)
    return found


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

    def launch(
        self,
        kernel: c_void_p,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        pointers: list[int],
        numbers: list[int],
        *,
        early: bool,
    ) -> None:
        """One kernel; its arguments are device pointers, then ints.

        early: it may start while the one before still runs (programmatic dependent launch); it
        must then wait by itself before it touches what that one writes or reads.
        """
        values: list[Any] = [*map(c_void_p, pointers), *map(c_int, numbers)]
        addresses = (c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        attribute = _Attribute(PROGRAMMATIC_SERIALIZATION, 0, int(early))
        config = _Config(
            (c_uint * 3)(*grid), (c_uint * 3)(threads, 1, 1), shared, self.handle,
            ctypes.pointer(attribute), int(early),
        )  # fmt: skip
        call("cuLaunchKernelEx", byref(config), kernel, addresses, None)


class Graph:
    """What was launched on a stream between `begin` and `end`, replayed as a whole."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._handle = stream, c_void_p()
        call("cuStreamBeginCapture_v2", stream.handle, CAPTURE_THREAD_LOCAL)

    def end(self) -> None:
        """Stop recording, make it ready to run."""
        graph = c_void_p()
        call("cuStreamEndCapture", self._stream.handle, byref(graph))
        call("cuGraphInstantiateWithFlags", byref(self._handle), graph, ctypes.c_ulonglong(0))
        call("cuGraphDestroy", graph)

    def launch(self) -> None:
        """Enqueue all of it."""
        call("cuGraphLaunch", self._handle, self._stream.handle)

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
        ctypes.c_uint64(device),
        c_void_p(host),
        c_size_t(size),
        stream.handle,
    )


def write(stream: Stream, device: int, data: bytes) -> None:
    """A copy from any host memory, done when this returns."""
    stream.wait()
    call("cuMemcpyHtoD_v2", ctypes.c_uint64(device), data, c_size_t(len(data)))


def to_host(stream: Stream, host: int, device: int, size: int) -> None:
    """Enqueue a copy of `size` bytes into pinned host memory."""
    call(
        "cuMemcpyDtoHAsync_v2",
        c_void_p(host),
        ctypes.c_uint64(device),
        c_size_t(size),
        stream.handle,
    )


def on_device(stream: Stream, to: int, origin: int, size: int) -> None:
    """Enqueue a copy of `size` bytes within the device."""
    call(
        "cuMemcpyDtoDAsync_v2",
        ctypes.c_uint64(to),
        ctypes.c_uint64(origin),
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

    def destroy(self) -> None:
        """Free it."""
        call("cuEventDestroy_v2", self._handle)
