"""`qrun bench` as it runs on a Mac: the table of all kernels there are to choose from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner

from qrun import bench, report
from qrun.cli import cli
from qrun.ops import _metal_backend
from qrun.ops import _metal_geometry as geometry
from qrun.ops._metal_ladder import ladder
from tests.emulated import emulated
from tests.ops import metal_support as support
from tests.test_metal_tune import Device, device

__all__ = ["device"]


def test_the_ladder_on_the_emulator() -> None:
    """Every rung and every form of qmv runs, agrees with MLX's product and is timed."""
    matrices = [support.matrix(40, 64, seed=seed) for seed in (1, 2)]
    with emulated() as launches:
        rungs = ladder(matrices, mx.float16, (1, 12, 40), traced=lambda f: f)
        rungs += ladder(matrices, mx.float32, (40,), traced=lambda f: f)
    assert all(rung.seconds > 0 and rung.mlx > 0 for rung in rungs)
    many = [r.way for r in rungs if r.m == 40]
    names = list(geometry.LADDER)
    assert [way.removesuffix(" (table)") for way in many] == [*names, "mlx", *names[:-1], "mlx"]
    for what in ("40x64 M=1 float16", "40x64 M=12 float16", "40x64 M=40 float16"):
        ways = [r.way for r in rungs if r.what == what]
        assert len(ways) >= 4
        assert [way.endswith(" (table)") for way in ways].count(True) == 1
        assert ways[-1] == "mlx"
    assert {launch.name.rsplit("_", 1)[0] for launch in launches} == {
        *("qrun_qmv", "qrun_qmv_wide", "qrun_qmm"),
    }


def test_the_whole_command(
    device: Device,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a device that is not there: what a Mac's user runs meets no error of Python."""
    del device  # it stands in for Metal
    clocked = partial(ladder, traced=lambda f: f)
    monkeypatch.setattr(_metal_backend, "ladder", clocked)
    for module in (bench, report):
        monkeypatch.setattr(module, "read_rate", lambda *_: 1e11)
        monkeypatch.setattr(module, "peak_rate", lambda dtype=None: None)
    monkeypatch.setattr(bench, "COLD_BYTES", 1 << 14)
    small = {"shapes": ((64, 128),)}
    kernels, model = bench.bench_kernels, bench.bench_model
    monkeypatch.setattr(bench, "bench_kernels", partial(kernels, **small, rows=(1, 40)))
    monkeypatch.setattr(bench, "bench_ladder", partial(bench.bench_ladder, **small))
    monkeypatch.setattr(
        bench, "bench_model", partial(model, prefills=(40,), contexts=(16,), rounds=1)
    )
    monkeypatch.setattr(bench, "STEPS", 2)
    out = tmp_path / "deep" / "bench.json"
    arguments = ["bench", str(tiny_folder), "--tune", "--rounds", "1", "--out", str(out)]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = done.output
    for what in (
        "qmv 64x128",
        "64x128 M=512 float16: 4x4 (table)",
        "M=512 float32: 4x2",
        "lanes: ",
    ):
        assert what in text, text
    assert "mlx" in text.splitlines()[1]  # a column of its own
    found = json.loads(out.read_text())
    assert found["backend"] == "metal"
    rungs = [row for row in found["rows"] if row["peers"]]
    assert len(rungs) > 20
    assert all(row["peers"]["mlx"] > 0 for row in rungs)


def test_elsewhere_there_is_no_ladder() -> None:
    assert bench.bench_ladder() == []
