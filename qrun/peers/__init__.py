"""Other runtimes that `qrun bench` runs in turn with qrun, so that all meet the same machine.

Each is a process of its own, `*_peer.py` beside this file, under any Python that has the runtime:
it may need other versions of the same packages. It speaks JSON, an object a line. First it says
{"name": ...}; to each {"what": "prefill" | "decode", "ids": [...], "steps": N} it answers
{"seconds": ...}: of feeding ids to an empty cache, or of N single tokens behind them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from qrun.config import refuse_non_files
from qrun.errors import UsageError

# name -> (module to import, what to install)
PEERS = {"llama.cpp": ("llama_cpp", "llama-cpp-python"), "mlx-lm": ("mlx_lm", "mlx-lm")}


class Peer:
    """A runtime with its model loaded, waiting to be asked."""

    def __init__(self, name: str, python: str, *arguments: object) -> None:
        """name: of PEERS. python: an executable that `require` has looked at."""
        script = Path(__file__).with_name(f"{PEERS[name][0]}_peer.py")
        self.name = name
        self._errors = TemporaryFile()  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [python, str(script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.name = str(self._answer()["name"])

    def seconds(self, what: str, ids: Sequence[int], steps: int) -> float:
        """Have it run once."""
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"what": what, "ids": list(ids), "steps": steps}) + "\n"
        )
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            raise UsageError(f"{self.name} ended: {said[-1] if said else 'without a word'}")
        return json.loads(line)


def asked(options: Sequence[str], ggufs: Sequence[Path]) -> list[tuple[str, str]]:
    """NAME[=PYTHON] of each option -> (name, python). Raises UsageError where one cannot run."""
    pairs = [option.partition("=")[::2] for option in options]
    wanted = [(name, python or sys.executable) for name, python in pairs]
    for name, python in wanted:
        require(name, python)
    if bool(ggufs) != any(name == "llama.cpp" for name, _ in wanted):
        raise UsageError("--peer llama.cpp and --gguf FILE, which it runs, go together")
    for path in ggufs:
        refuse_non_files(path)
    return wanted


def require(name: str, python: str) -> None:
    """Raise UsageError, with what to do, unless that Python can import that peer."""
    if name not in PEERS:
        raise UsageError(f"no peer {name!r} is known (known: {', '.join(PEERS)})")
    module, package = PEERS[name]
    look = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({module!r}))"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True).returncode == 0
    except OSError as error:
        raise UsageError(f"{python}, to run {name} with: {error.strerror}") from None
    if not found:
        raise UsageError(
            f"{name} is not installed for {python}",
            hint=f"pip install {package} in a venv, and --peer {name}=VENV/bin/python",
        )
