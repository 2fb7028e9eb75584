"""scripts/bench_cuda_peers.py as far as it goes without a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from ctypes import c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import _cuda_product
from qrun.quantization import Quantization, dequantize_ref

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_cuda_peers.py"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("bench_cuda_peers", SCRIPT)
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_cuda_peers", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(peers: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With one small shape and few copies."""
    monkeypatch.setattr(peers, "SHAPES", ((64, 128),))
    monkeypatch.setattr(peers, "ROWS", (1, 3))
    monkeypatch.setattr(peers, "ROTATED", 20_000)
    monkeypatch.setattr(peers, "LAUNCHES", 8)
    return peers


def test_weights_rotate_past_the_cache(peers: Any) -> None:
    for shape in peers.SHAPES:
        matrix = peers.Matrix(*shape)
        least = matrix.n * matrix.k * (1 / 2 + 2 / peers.GROUP)
        assert 320e6 <= matrix.copies * least < 320e6 + least
        for rows in peers.ROWS:
            assert matrix.launches(rows) % matrix.copies == 0
        assert matrix.launches(1) >= 96


def test_the_reference_is_the_affine_matrix(small: Any) -> None:
    matrix, x = small.Matrix(64, 128), np.eye(128, dtype=np.float32)
    scales = matrix.scales.astype(np.float64)
    w = dequantize_ref(matrix.w, scales, -8 * scales, Quantization(4, 64))
    np.testing.assert_array_equal(matrix.product(x, np.arange(64)), w.T)


def test_wrong_and_failing_libraries_get_no_time(small: Any) -> None:
    def fake(us: float, off: float) -> Any:
        def library(matrix: Any, x: Any, launches: int) -> Any:
            def result(rows: Any, columns: Any) -> Any:
                return matrix.product(x[rows], columns) * (1 + off)

            return lambda: us * launches / 1e6, result

        return library

    def failing(matrix: Any, x: Any, launches: int) -> Any:
        raise RuntimeError("no such\nkernel")

    said: list[str] = []
    libraries = {"qrun": fake(2, 0), "a": fake(3, 0.001), "b": fake(1, 0.5), "c": failing}
    points = [(small.Matrix(64, 128), rows) for rows in (3, 1)]
    found = list(small.measure(libraries, points, 100, said.append))
    assert [set(f.samples) for f in found] == [{"qrun", "a"}] * 2
    assert said[0] == "b at 64x128 M 3: ArithmeticError: off by 5.0e-01 of the result"
    assert said[1] == "c at 64x128 M 3: RuntimeError: no such kernel"
    head, first, second = small.table(found, list(libraries)).splitlines()
    assert head.split()[:7] == ["N", "x", "K", "M", "qrun", "a", "b"]
    assert first.split() == ["64x128", "1", "2.00", "3.00", "-", "-", "1.50", "0.0"]
    assert second.split()[1] == "3"


def test_it_ends_when_the_budget_is_spent(small: Any) -> None:
    now = 0.0

    def library(matrix: Any, x: Any, launches: int) -> Any:
        def seconds() -> float:
            nonlocal now
            now += 1
            return 1.0  # slow: every third round only

        return seconds, lambda rows, columns: matrix.product(x[rows], columns)

    said: list[str] = []
    points = [(small.Matrix(64, 128), rows) for rows in (1, 2, 3)]
    found = list(small.measure({"qrun": library}, points, 5.5, said.append, clock=lambda: now))
    assert [len(f.samples["qrun"]) for f in found] == [3, 1]
    assert said == ["5.5 s are over: 1 of 3 points left out"]


def test_qrun_records_one_product_a_launch(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tapes: list[Any] = []
    monkeypatch.setattr(small, "load", tapes.append)
    monkeypatch.setattr(_cuda_product, "generation", lambda: 9)
    matrix = small.Matrix(64, 128)
    library = small.qrun([(matrix, 1), (matrix, 300)])
    assert [one.plan.kernel.label.split()[0] for one in tapes[0].launches] == [
        "qmv",
        "qmm_arrange",
        "qmm_wgmma",
    ]

    class Program:
        def __init__(self, tape: Any, *_: Any) -> None:
            tapes.append(tape)

        def __call__(self, inputs: Any) -> Any:
            return inputs

    monkeypatch.setattr(small, "Program", Program)
    monkeypatch.setattr(small.driver, "stream", lambda: SimpleNamespace(handle=c_void_p()))
    library(matrix, np.zeros((1, 128), np.float32), 8)
    rotated = {id(one.arrays[1]) for one in tapes[1].launches}
    assert (len(tapes[1].launches), len(rotated)) == (8, matrix.copies)


def test_who_cannot_take_part_is_named(
    small: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["bench", "--budget", "60", "--out", str(out)])
    monkeypatch.setattr(small.driver, "enter", lambda: None)

    def missing(name: str) -> Any:
        if name == "mlx.core":
            return mx
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(small, "import_module", missing)
    monkeypatch.setattr(small, "qrun", lambda points: small.humming(points))
    small.main()
    said = capsys.readouterr().out
    assert "humming is left out: ModuleNotFoundError: No module named 'torch'" in said
    assert "torch is left out" in said and "qrun is left out" in said
    assert said.splitlines()[-1].startswith("largest error: mlx.core ")
    written = json.loads(out.read_text())
    assert [p["rows"] for p in written["points"]] == [1, 3]
    assert written["points"][0]["errors"]["mlx.core"] < 0.05
    assert len(written["notes"]) == 4
