"""The CUDA ops on the GPU: the cases of scripts/check_cuda.py."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import mlx.core as mx
import pytest

from qrun import paths

if not mx.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)


def script() -> ModuleType:
    path = paths.KERNELS.parent / "scripts" / "check_cuda.py"
    spec = importlib.util.spec_from_file_location("check_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = script()
CASES = [
    *check.products(),
    *check.rows(),
    *check.mixtures(),
    *check.ropes(),
    *check.sdpas(),
    *check.attends(),
    *check.chain(),
]


@pytest.mark.parametrize("run", [run for _, run in CASES], ids=[label for label, _ in CASES])
def test_op(run: object) -> None:
    mx.set_default_device(mx.gpu)  # conftest means the CPU
    for got, ref in run():  # type: ignore[operator]
        assert got.shape == ref.shape
        error = abs(check.f64(got) - ref).max() / max(float(abs(ref).max()), 1e-30)
        assert error <= check.ALLOWED.get(got.dtype, 0.0)
