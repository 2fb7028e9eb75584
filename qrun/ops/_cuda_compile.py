"""CUDA C++ to machine code with NVRTC, for this very GPU, kept on disk between processes.

MLX's own door to NVRTC compiles anew in every process, and for sm_90 where wgmma needs sm_90a.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from qrun import paths
from qrun.errors import BackendError
from qrun.ops import _cuda_driver as driver
from qrun.ops import _launch


def compiled(source: str) -> bytes:
    """The cubin of a translation unit whose includes are relative to kernels/."""
    kept = _kept(source)
    try:
        return kept.read_bytes()
    except OSError:  # not there, or not for us
        cubin = compile_source(source, architecture(), include_paths())
    _keep(kept, cubin)
    return cubin


def _kept(source: str) -> Path:
    """Where its cubin lies, if it has been compiled."""
    parts = (source, _headers(), architecture(), str(_version()))
    key = hashlib.sha256("\n".join(parts).encode())
    return paths.cache_dir() / "cuda" / f"{key.hexdigest()[:32]}.cubin"


def compile_all(sources: list[str]) -> None:
    """What of them is not on disk yet, side by side: NVRTC takes a second for a large one."""
    missing = [source for source in dict.fromkeys(sources) if not _kept(source).exists()]
    if not missing:
        return
    _launch.show(f"compiling {len(missing)} CUDA kernels, once for this machine")
    with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
        list(pool.map(compiled, missing))
    _launch.show("")


def _keep(path: Path, cubin: bytes) -> None:
    """Written whole or not at all; a disk that takes nothing only costs the next process time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(cubin)
        os.replace(file.name, path)
    except OSError:
        return


def architecture() -> str:
    """As nvcc calls it. The "a" is what Hopper's matrix instructions ask for."""
    major, minor = driver.compute_capability()
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def compile_source(source: str, arch: str, includes: list[Path]) -> bytes:
    """The same without a cache. Raises BackendError with the compiler's first complaint."""
    rtc, program = _rtc(), c_void_p()
    rtc.nvrtcCreateProgram(byref(program), source.encode(), b"qrun.cu", 0, None, None)
    options = [
        "--std=c++17",
        f"--gpu-architecture={arch}",
        "--device-as-default-execution-space",
        *(f"--include-path={path}" for path in (paths.KERNELS, *includes)),
    ]
    given = (c_char_p * len(options))(*(o.encode() for o in options))
    try:
        if rtc.nvrtcCompileProgram(program, len(options), given):
            log = _text(program, "ProgramLog").decode(errors="replace")
            first = next((line for line in log.splitlines() if "error" in line), log)
            raise BackendError(f"a CUDA kernel does not compile for {arch}: {first[:500]}")
        return _text(program, "CUBIN")
    finally:
        rtc.nvrtcDestroyProgram(byref(program))


def _text(program: c_void_p, what: str) -> bytes:
    """A result of NVRTC: first its size, then its bytes."""
    size = c_size_t()
    getattr(_rtc(), f"nvrtcGet{what}Size")(program, byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(_rtc(), f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


@cache
def _headers() -> str:
    """A digest of every file that a kernel may include."""
    digest = hashlib.sha256()
    for path in sorted(paths.KERNELS.rglob("*.cuh")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _rtc() -> Any:
    """NVRTC as MLX has loaded it: found by the name under which it is in the process."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        loaded = re.search(r"\S*/libnvrtc\.so\.\d+\S*", file.read())
    if loaded is None:
        raise BackendError("NVRTC, CUDA's run-time compiler, is not loaded: MLX has no CUDA here")
    return ctypes.CDLL(loaded[0])


@cache
def _version() -> tuple[int, int]:
    major, minor = c_int(), c_int()
    _rtc().nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


@cache
def include_paths() -> list[Path]:
    """Where cuda_fp16.h lies: beside MLX as a wheel, else in the toolkit, as MLX looks for it."""
    packages = Path(str(mx.__file__)).parents[1]
    major = _version()[0]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    places = [
        packages / "nvidia" / ("cuda_runtime" if major < 13 else f"cu{major}") / "include",
        Path(home) / "include",
    ]
    found = [place for place in places if (place / "cuda_fp16.h").is_file()]
    if not found:
        raise BackendError(
            "CUDA's headers are not found", hint="set CUDA_HOME to where CUDA is installed"
        )
    return [found[0], found[0] / "cccl"]
