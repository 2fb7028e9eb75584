"""Fixtures: the backends that run here, tiny checkpoints, the real model, the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from qrun.loader import LoadedModel, load
from qrun.ops import _launch
from tests.tiny import tiny

ROOT = Path(__file__).resolve().parent.parent
NATIVE = _launch.native_problem() is None


BACKENDS = ["mlx", pytest.param("cpu", marks=pytest.mark.native)]
if mx.cuda.is_available():
    BACKENDS.append("cuda")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every backend that runs on this machine, one after the other; Metal has its own tests."""
    module = import_module(f"qrun.ops._{request.param}")
    if request.param == "cuda":
        mx.set_default_device(mx.gpu)
    monkeypatch.setattr(_launch, "_backend", lambda device: module)
    return module


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "native: needs the CPU kernels of qrun._ext")
    config.addinivalue_line("markers", "alone: wants an error from a running task")
    if not NATIVE:
        # Said once, by test_hardware; every load would say it again.
        config.addinivalue_line("filterwarnings", "ignore:.*using MLX's own slow CPU product")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is `alone` has a process of its own.

    Where a task fails, MLX may count another one as under way for ever, and with two of those a
    later eval may wait for good.
    """
    if pyfuncitem.get_closest_marker("alone") is None or os.environ.get("QRUN_TEST_ALONE"):
        return None
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", pyfuncitem.nodeid],
        env={**os.environ, "QRUN_TEST_ALONE": "1"},
        cwd=pyfuncitem.config.rootpath,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return True


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if NATIVE:
        return
    for item in items:
        if item.get_closest_marker("native"):
            item.add_marker(pytest.mark.skip(reason=str(_launch.native_problem())))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama, 4 bits in groups of 32, byte-level tokenizer. Not to be changed by a test."""
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> LoadedModel:
    """The same, loaded."""
    return load(tiny_folder)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The pinned GGUF of SmolLM2-135M-Instruct, fetched by scripts/test."""
    path = os.environ.get("QRUN_SMOLLM2_GGUF")
    if not path:
        pytest.skip("QRUN_SMOLLM2_GGUF is not set (scripts/test sets it)")
    return Path(path)


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2-135M-Instruct as qrun converts it."""
    from qrun.convert import convert

    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert(smollm2_gguf, folder)
    yield folder
    for file in folder.iterdir():  # 90 MB that pytest would keep for three more runs
        file.unlink()


@pytest.fixture(scope="session")
def smollm2_model(smollm2: Path) -> LoadedModel:
    """The same, loaded in float32."""
    return load(smollm2, dtype="float32")


@dataclass(frozen=True)
class Outcome:
    """What a process left behind."""

    code: int
    out: bytes
    err: str


Run = Callable[..., Outcome]


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment for a child, with changes; None removes."""
    values: dict[str, str | None] = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": None,
        "QRUN_MODEL": None,
        **changes,
    }
    return {k: v for k, v in values.items() if v is not None}


@pytest.fixture(scope="session")
def cli() -> Run:
    """Run the real command line in a process of its own: cli("generate", folder, ...)."""

    def run(*args: object, stdin: bytes = b"", cwd: Path | None = None, **env: str) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "qrun", *map(str, args)],
            input=stdin,
            capture_output=True,
            env=environment(**env),
            cwd=cwd,
            timeout=120,
        )
        return Outcome(done.returncode, done.stdout, done.stderr.decode())

    return run


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """The same command line in this process, for the many runs that end soon."""
    from qrun.cli import main

    def run(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["qrun", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capfdbinary.readouterr()
        return Outcome(code, out, err.decode())

    return run


@pytest.fixture
def python() -> Callable[..., str]:
    """Run Python code in a fresh process and return what it prints; it must succeed."""

    def run(code: str, *args: object, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, args)],
            capture_output=True,
            text=True,
            env=environment(**env),
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    """Tests mean the CPU, whatever else the machine has."""
    mx.set_default_device(mx.cpu)
