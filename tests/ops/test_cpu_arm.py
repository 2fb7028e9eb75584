"""The NEON kernels on a machine that is none of ARM's: cross-compiled and run by QEMU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

MISSING = [
    t for t in ("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64-static") if not shutil.which(t)
]


@pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {', '.join(MISSING)}")
def test_neon_kernels_under_qemu(tmp_path: Path) -> None:
    command = [str(ROOT / "tests/cpp/arm"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "neon: right" in done.stdout
