"""What this machine is: MLX's backend, device name, measured memory bandwidth."""

from __future__ import annotations

import os
import platform
import resource
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

from qrun.errors import BackendError, UsageError

SPARE = 8 << 20  # bytes
LOOP = 512 << 20  # bytes: more than most caches hold


def require_mlx() -> None:
    """Raise BackendError, with the command to run, where MLX cannot be imported."""
    try:
        import mlx.core  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        if sys.platform == "linux" and "libmlx" in str(error):
            raise BackendError(
                "MLX is installed without a backend",
                hint='run: pip install "mlx[cpu]==0.32.4"   (or mlx[cuda13], mlx[cuda12])',
            ) from None
        raise BackendError(
            f"MLX does not load: {str(error).splitlines()[0]}", hint='run: pip install "qrun[cpu]"'
        ) from None


def set_threads(count: int | None) -> None:
    """CPU threads of the native kernels; None: $QRUN_NUM_THREADS, or all the process may use."""
    require_mlx()
    from qrun.ops import _launch

    if _launch.native_problem() is None:
        from qrun import _ext

        if count is not None:
            _ext.set_threads(count)
        try:
            _ext.threads()
        except (RuntimeError, ValueError) as error:  # $QRUN_NUM_THREADS is no number
            raise UsageError(str(error)) from None


class _Sparing:
    """MLX's cache limit, which is the process's: low as long as any thread wants it."""

    def __init__(self) -> None:
        self._lock, self._threads, self._before = threading.Lock(), 0, 0

    def begin(self) -> None:
        """One thread more."""
        import mlx.core as mx

        with self._lock:
            if self._threads == 0:
                self._before = mx.set_cache_limit(SPARE)
            self._threads += 1

    def end(self) -> None:
        """One less."""
        import mlx.core as mx

        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                mx.set_cache_limit(self._before)


_sparing = _Sparing()


@contextmanager
def sparing() -> Generator[None]:
    """On a CPU: keep little of what is freed inside for later use, and none of it behind."""
    import mlx.core as mx

    from qrun.ops import _launch

    if mx.default_device().type != mx.cpu:
        yield
        return
    _sparing.begin()
    try:
        yield
    finally:
        _sparing.end()
        mx.clear_cache()
        if _launch.native_problem() is None:
            from qrun import _ext

            _ext.trim()


def device_name() -> str:
    """The name of the processor that runs the model."""
    import mlx.core as mx

    if mx.default_device().type == mx.gpu:
        return str(mx.device_info().get("device_name", "GPU"))
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


@cache
def read_bandwidth(size: int = LOOP) -> float:
    """Bytes a second that a plain loop reaches here, measured once a process (about 0.2 s).

    On a CPU it reads `size` bytes, LOOP at most, again and again, as decode steps read the weights:
    a large cache holds part of them from one time to the next.
    """
    import mlx.core as mx

    from qrun.ops import _launch

    if mx.default_device().type == mx.cpu and _launch.native_problem() is None:
        from qrun import _ext

        size = min(max(size, 1 << 20), LOOP)
        return max(_ext.read_bandwidth(size, _ext.threads()) for _ in range(10)) * 1e9
    import numpy as np

    # On a GPU an element-wise op moves memory as fast as it goes, read and write counted; on a CPU
    # MLX's ops do not, numpy's reduction does.
    on_cpu = mx.default_device().type == mx.cpu
    block = np.ones(1 << 26, np.float32)
    device_block = None if on_cpu else mx.array(block)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        if device_block is None:
            block.max()
        else:
            mx.eval(device_block + 1)
        best = min(best, time.perf_counter() - start)
    return (1 if on_cpu else 2) * block.nbytes / best


def memory_size() -> int:
    """Bytes of memory that the model's processor has."""
    import mlx.core as mx

    if mx.default_device().type == mx.gpu:
        size = mx.device_info().get("memory_size")
        if isinstance(size, int):
            return size
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory() -> int:
    """The process's largest resident size so far, bytes; on a GPU MLX's peak, if that is larger."""
    import mlx.core as mx

    if mx.default_device().type == mx.gpu:
        return max(_peak_resident(), mx.get_peak_memory())
    return _peak_resident()


def _peak_resident() -> int:
    try:
        # getrusage would count what the parent process held when it started this one.
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
