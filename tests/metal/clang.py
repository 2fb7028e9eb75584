"""Clang as a Metal front end: where it is, with which flags, and a cache of what it made.

C++ for OpenCL has Metal's address spaces in its type system, no double, no standard library, no
exceptions: one compile checks those rules and gives code for this machine. Any clang from 19 on
will do; Debian's `clang-19` and the one inside PyPI's `ziglang` (clang 22) are tested.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
RUNTIME = HERE / "runtime"
NEEDED = 19

METAL_FLAGS = [
    *["-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-cl-single-precision-constant"],
    *["-Xclang", "-cl-ext=-all,+__opencl_c_generic_address_space,+cl_khr_fp16"],
    *["-nostdinc", "-I", str(INCLUDE), "-include", "emulator_base.h", "-Dstatic_cast=metal::cast"],
    # 16-bit sums must round to 16 bits at every step, as on the GPU.
    *["-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"],
    *["-ffp-contract=off", "-fno-math-errno"],
    "-ftrivial-auto-var-init=pattern",  # what a thread forgot to set is NaN
    # Metal refuses, or means something else by, what these warn of.
    *["-Werror=uninitialized", "-Werror=sometimes-uninitialized", "-Werror=return-type"],
    *["-Wno-unknown-attributes", "-Wno-ignored-attributes", "-Wno-unused-value"],
    *["-Wno-unused-command-line-argument", "-Wno-psabi"],
]
X86_FLAGS = [
    "-fno-finite-loops",  # an endless loop is a finding, no licence to drop it
    *["-fPIC", "-mf16c", "-mavx2", "-fno-omit-frame-pointer", "-fvisibility=hidden"],
    # Every load and store calls the runtime, as the source has it: no merging, no memcpy idioms.
    *["-fsanitize=thread", "-fno-vectorize", "-fno-slp-vectorize"],
    *["-mllvm", "-tsan-instrument-func-entry-exit=0"],
    *["-mllvm", "-tsan-instrument-read-before-write=1"],
    *["-mllvm", "-tsan-instrument-atomics=0"],
    *["-mllvm", "-disable-loop-idiom-all"],
    "-fsanitize=alignment,array-bounds,integer-divide-by-zero",
    "-fsanitize-recover=alignment,array-bounds,integer-divide-by-zero",
    *["-gdwarf-4", "-gline-tables-only"],
]


def unsupported() -> str | None:
    """Why kernels cannot run here, if so: fibers switch by a few instructions of this processor."""
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return None
    return f"the emulator runs on x86-64 Linux, not on {platform.machine()} {sys.platform}"


class CompileError(Exception):
    """Clang, or the lint, refused a kernel; the text has the reasons with their lines."""


def version(command: list[str]) -> int:
    """The major number of a clang; 0 if the command is none."""
    try:
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    words = run.stdout.split("clang version ")
    return int(words[1].split(".")[0]) if run.returncode == 0 and len(words) > 1 else 0


@functools.cache
def find_clang() -> list[str]:
    """The command that runs a clang of version 19 or newer.

    In this order: $QRUN_CLANG, clang-19 and newer ones on the PATH, plain clang, PyPI's ziglang.
    """
    if chosen := os.environ.get("QRUN_CLANG"):
        return chosen.split()
    names = [f"clang-{v}" for v in range(NEEDED, NEEDED + 8)] + ["clang"]
    for name in names:
        if (path := shutil.which(name)) and version([path]) >= NEEDED:
            return [path]
    if found := importlib.util.find_spec("ziglang"):  # its program itself starts in no time
        return [str(Path(str(found.origin)).with_name("zig")), "clang"]
    raise CompileError(
        f"no clang {NEEDED} or newer: `apt-get install --no-install-recommends clang-19`, "
        "or `pip install ziglang`, or name one in $QRUN_CLANG"
    )


@functools.cache
def cache_folder() -> Path:
    """$QRUN_METAL_CACHE, or a folder of this user in the system's temporary folder."""
    default = Path(tempfile.gettempdir()) / f"metal-emulator-{os.getuid()}"
    folder = Path(os.environ.get("QRUN_METAL_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _fingerprint() -> str:
    """Changes whenever the compiler, the shim, the runtime or the flags do."""
    h = hashlib.sha256(repr((find_clang(), METAL_FLAGS, X86_FLAGS)).encode())
    h.update(subprocess.run([*find_clang(), "--version"], capture_output=True, check=True).stdout)
    for folder in (INCLUDE, RUNTIME):
        for file in sorted(folder.iterdir()):
            h.update(file.name.encode() + file.read_bytes())
    return h.hexdigest()


def _run(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{what}:\n{done.stderr.strip()}")
    return done.stderr


def _host(what: str) -> list[str]:
    """The driver that knows this machine's C library: "c++" compiles the runtime, "cc" links.

    `zig clang` is bare; `zig cc` and `zig c++` bring a C library of their own.
    """
    clang = find_clang()
    return [*clang[:-1], what] if len(clang) > 1 else clang


@functools.cache
def _runtime_objects() -> list[Path]:
    folder = cache_folder() / ("runtime-" + _fingerprint()[:20])
    sources = sorted(RUNTIME.glob("*.cpp"))
    if not folder.exists():
        work = Path(tempfile.mkdtemp(dir=cache_folder()))
        for source in sources:
            flags = ["-x", "c++", "-std=c++20", "-O2", "-fPIC", "-mf16c", "-fno-exceptions"]
            flags += ["-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"]
            flags += ["-fno-rtti", "-fno-stack-protector", "-fvisibility=hidden"]
            target = work / (source.stem + ".o")
            _run([*_host("c++"), *flags, "-c", str(source), "-o", str(target)], source.name)
        try:
            work.rename(folder)
        except OSError:  # another process was quicker
            shutil.rmtree(work)
    return [folder / (s.stem + ".o") for s in sources]


def build(source: str, literal: bool = False) -> Path:
    """Metal source, signature and entry included -> shared object with the runtime in it.

    At -O1 clang drops loads whose value is not used and loads twice-read values once, as any
    compiler for a GPU would. `literal`: -O0, every access as the source has it.
    """
    key = hashlib.sha256(f"{_fingerprint()} {literal} {source}".encode()).hexdigest()[:32]
    target = cache_folder() / f"{key}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=cache_folder()) as work:
        text, obj, out = Path(work, "kernel.metal"), Path(work, "kernel.o"), Path(work, "k.so")
        text.write_text(source)
        flags = [*METAL_FLAGS, *X86_FLAGS, "-O0" if literal else "-O1"]
        _run([*find_clang(), *flags, "-c", str(text), "-o", str(obj)], "clang refuses")
        objects = [str(o) for o in _runtime_objects()]
        link = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", str(obj), *objects, "-o", str(out)]
        _run([*_host("cc"), *link, "-lm", "-lc"], "link")
        out.rename(target)
    return target
