"""What the machine is, and which backend runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

from qrun import bench
from qrun.hardware import LOOP, device_name, peak_memory, read_bandwidth
from qrun.loader import load
from qrun.ops import _launch
from tests.conftest import NATIVE
from tests.tiny import tiny


@pytest.fixture
def _fresh_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the backend anew in this test, and again after it."""
    for name in ("_backend", "native_problem"):
        monkeypatch.setattr(_launch, name, getattr(_launch, name).__wrapped__)


def test_the_device_has_a_name() -> None:
    assert device_name()
    assert "\n" not in device_name()


def test_peak_memory_is_in_bytes() -> None:
    before = peak_memory()
    block = np.ones(1 << 25, np.uint8)
    assert 10 << 20 < before < 1 << 40
    assert peak_memory() >= before
    assert block.nbytes


def test_bandwidth_is_that_of_a_memory() -> None:
    """Between a slow disk and the fastest memory there is; a unit mixed up leaves this range."""
    assert 5e8 < read_bandwidth() < 2e13
    assert read_bandwidth() == read_bandwidth()  # measured once
    assert 5e8 < read_bandwidth(1) < 2e13  # a tiny model's step


@pytest.mark.skipif(not NATIVE, reason="numpy's loop is always as long")
@pytest.mark.parametrize(("size", "read"), [(1, 1 << 20), (100 << 20, 100 << 20), (9 << 30, LOOP)])
def test_the_loop_reads_as_many_bytes_as_a_step(
    size: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again: what a cache then holds of them, it holds for a step too."""
    rates = iter(range(1, 100))
    sizes: list[int] = []

    def loop(size: int, threads: int) -> float:
        sizes.append(size)
        return next(rates)

    monkeypatch.setattr("qrun._ext.read_bandwidth", loop)
    assert read_bandwidth.__wrapped__(size) == len(sizes) * 1e9
    assert set(sizes) == {read}


@pytest.mark.usefixtures("_fresh_choice")
def test_no_native_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_launch, "find_spec", lambda name: None)
    assert _launch.backend().NAME == "mlx"
    tiny(tmp_path)
    with pytest.warns(UserWarning, match="no native CPU kernels lie in") as caught:
        load(tmp_path)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    # qrun bench measures MLX's products then, with nothing of ours to compare.
    assert bench.threads() == 0
    assert bench.read_rate() > 1e6
    assert bench.peak_rate() is None


@pytest.mark.usefixtures("_fresh_choice")
@pytest.mark.parametrize("version", ["0.0.1", mx.__version__])
def test_native_kernels_of_another_mlx_are_not_used(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import qrun

    ext = ModuleType("qrun._ext")
    ext.mlx_version = version  # pyright: ignore[reportAttributeAccessIssue]
    ext.isa = lambda: "portable"  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "qrun._ext", ext)
    monkeypatch.setattr(qrun, "_ext", ext, raising=False)
    monkeypatch.setattr(_launch, "find_spec", lambda name: name)
    problem = _launch.native_problem()
    if version == mx.__version__:
        assert problem is None
        return
    assert problem is not None
    assert "built for mlx 0.0.1" in problem
    assert mx.__version__ in problem
    assert _launch.backend().NAME == "mlx"


@pytest.mark.usefixtures("_fresh_choice")
def test_native_kernels_that_do_not_load_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise ImportError("undefined symbol: _ZN3mlx4core5arrayE\nand more")

    monkeypatch.setattr(_launch, "find_spec", lambda name: name)
    monkeypatch.setattr(_launch, "import_module", broken)
    problem = _launch.native_problem()
    assert problem is not None
    assert "do not load (undefined symbol" in problem
    assert "\n" not in problem


@pytest.mark.native
def test_the_native_kernels_run_where_they_are() -> None:
    assert NATIVE
    assert _launch.backend().NAME == "cpu"


def test_every_backend_has_every_op(backend: ModuleType) -> None:
    for name in _launch.Backend.__annotations__:
        assert hasattr(backend, name), name
