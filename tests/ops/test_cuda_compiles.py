"""Every instantiation of the CUDA kernels compiles, for 8.0 and 9.0a, without spilling a register.

Needs nvcc, no GPU. A spill costs more than the kernel's whole idea gains; ptxas warnings C7512,
C7514, C7518 and C7520 say that wgmma instructions wait for one another.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qrun.ops._cuda_launch import Kernel
from qrun.paths import KERNELS
from tests.ops import cuda_sources

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
BATCH = 48  # kernels a call of nvcc: reading CUDA's headers takes as long as three kernels


def _problems(label: str, log: str) -> list[str]:
    """What ptxas reports of a kernel that must not be."""
    spilled = [n for n in re.findall(r"(\d+) bytes spill", log) if n != "0"]
    found = [f"{label}: spills {'/'.join(spilled)} bytes"] if spilled else []
    return found + [f"{label}: {code}" for code in re.findall(r"C75(?:12|14|18|20)", log)]


def _compile(folder: Path, index: int, batch: list[Kernel], arch: str) -> list[str]:
    path = folder / f"{index}.cu"
    path.write_text("\n".join(kernel.text for kernel in batch))
    target = arch.removeprefix("sm_")
    run = subprocess.run(
        [
            *(str(NVCC), "-std=c++17", f"-gencode=arch=compute_{target},code={arch}", "-cubin"),
            *("-I", str(KERNELS), "-Xptxas", "-v"),
            *("-o", str(folder / f"{index}.cubin"), str(path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        return [f"{[kernel.label for kernel in batch]} do not compile:\n{run.stderr[-3000:]}"]
    logs = dict(
        re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", run.stderr, re.S)
    )
    return [p for kernel in batch for p in _problems(kernel.label, logs[kernel.name])]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_instantiation_compiles_without_spills(arch: str, tmp_path: Path) -> None:
    items = sorted(
        cuda_sources.record(int(re.sub(r"\D", "", arch)) // 10), key=lambda kernel: kernel.text
    )
    batches = [items[i : i + BATCH] for i in range(0, len(items), BATCH)]
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
        found = pool.map(lambda b: _compile(tmp_path, b[0], b[1], arch), enumerate(batches))
        problems = [p for each in found for p in each]
    assert not problems, "\n".join(problems)
