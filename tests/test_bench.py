"""`qrun bench`: what is refused before anything is measured, and peers side by side."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from qrun import bench, report
from tests.conftest import Run, environment

# As much of llama-cpp-python as the peer uses; a GGUF named "bad" ends it.
LLAMA_CPP = """
import time
from types import SimpleNamespace

class Llama:
    def __init__(self, path, **options):
        assert options["n_threads"] >= 1
        if "bad" in path:
            raise ValueError("no such format")
        self._ctx = SimpleNamespace(kv_cache_clear=lambda: None)

    def reset(self):
        self.held = 0

    def eval(self, ids):
        self.held += len(ids)
        time.sleep(1e-3 * len(ids))
"""


@pytest.fixture
def llama_cpp(tmp_path: Path) -> str:
    """A PYTHONPATH on which the peer's Python finds it."""
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "llama_cpp.py").write_text(LLAMA_CPP)
    (tmp_path / "model.Q4_0.gguf").touch()
    (tmp_path / "bad.gguf").touch()
    own = environment().get("PYTHONPATH", "")
    return f"{tmp_path / 'peer'}{os.pathsep}{own}".rstrip(os.pathsep)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}", "--tune"], "cpu has no kernels to choose from"),
        (["--tune"], "--tune needs a MODEL"),
        (["{model}/nothing"], "nothing"),
        (["--peer", "mlx-lm"], "--peer needs a MODEL"),
        (["{model}", "--peer", "vllm"], "no peer 'vllm' is known (known: llama.cpp, mlx-lm)"),
        (["{model}", "--peer", "llama.cpp"], "llama.cpp is not installed for"),
        (["{model}", "--peer", "mlx-lm=/nothing/python"], "/nothing/python, to run mlx-lm with"),
        (["{model}", "--gguf", "{gguf}"], "--peer llama.cpp and --gguf FILE"),
        (["--no-kernels"], "nothing to measure"),
        (["--group-size", "33"], "'33' is not one of"),
        (["{model}", "--out", "{gguf}/out.json"], "model.gguf"),
    ],
)
def test_refused_before_anything_is_measured(
    arguments: list[str], message: str, cli: Run, tiny_folder: Path, tmp_path: Path
) -> None:
    """Kernels alone would take half a minute."""
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    done = cli("bench", *(a.format(model=tiny_folder, gguf=gguf) for a in arguments))
    assert done.code in ((1,) if "--out" in arguments else (2, 3))
    assert message in done.err
    assert done.out == b""


def test_a_peer_side_by_side(cli: Run, tiny_folder: Path, tmp_path: Path, llama_cpp: str) -> None:
    files = ["--gguf", tmp_path / "model.Q4_0.gguf"]
    ask = ["bench", tiny_folder, "--no-kernels", "--rounds", 3, "--peer", "llama.cpp", *files]
    done = cli(*ask, "--json", PYTHONPATH=llama_cpp)
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [row["what"] for row in rows] == ["prefill 16", "decode at 16"]
    for row in rows:
        (name,) = row["peers"]
        assert name.startswith("llama.cpp model.Q4_0, ")
        assert len(row["seconds"]) == len(row["peer_seconds"][name]) == 3
        assert 100 < row["peers"][name] < 1100  # tokens a second, at a millisecond each
        assert row["ratios"][name] == pytest.approx(row["rate"] / row["peers"][name], rel=1)
    assert rows[0]["share"] is None
    assert rows[1]["share"] > 0


def test_a_peer_that_fails_says_why(
    cli: Run, tiny_folder: Path, tmp_path: Path, llama_cpp: str
) -> None:
    ask = ["bench", tiny_folder, "--no-kernels", "--peer", "llama.cpp"]
    done = cli(*ask, "--gguf", tmp_path / "bad.gguf", PYTHONPATH=llama_cpp)
    assert done.code == 2
    assert done.err.splitlines()[0] == "qrun: error: llama.cpp ended: ValueError: no such format"


def test_a_slow_peer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        name = "slow"
        asked = 0

        def seconds(self, what: str, ids: list[int], steps: int) -> float:
            self.asked += 1
            time.sleep(2e-3)
            return 4.0

    monkeypatch.setattr(bench, "PATIENCE", 1e-3)
    peer = Slow()
    row = bench.Turns(lambda: 2.0, [1] * 40, [peer]).row("prefill", 40, 5)  # pyright: ignore
    assert peer.asked == 1
    assert row.seconds == [2.0] * 5
    assert row.peer_seconds == {"slow": [4.0]}
    assert row.ratios == {"slow": 2.0}


def test_the_roofline_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"what": "qmv 64x64 g64 M=1", "seconds": [1e-6], "flops": 8192.0, "bytes": 2304.0}
    machine = {"device": "a CPU", "threads": 2, "read_bytes_per_second": 2e10, "peak_gflops": 300.0}
    report.plot({**machine, "rows": [row]}, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
