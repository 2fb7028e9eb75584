"""Names of models, and Hugging Face's cache: no network where none is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qrun.errors import CheckpointError, ModelNotFoundError
from qrun.hub import PATTERNS, is_complete, locate
from tests.conftest import environment
from tests.tiny import tiny

NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens
# Ends the process with 99 at the first socket.
GUARD = """
import os, sys
def hook(event, args):
    if event.startswith("socket."):
        sys.stderr.write(f"{event} {args}")
        sys.stderr.flush()
        os._exit(99)
sys.addaudithook(hook)
from qrun.cli import main
main()
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache as huggingface_hub lays it out: snapshots of links into blobs. HF_HOME's value."""
    repository = tmp_path / "hf" / "hub" / "models--owner--tiny"
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    tiny(snapshot, shards=2)
    (repository / "blobs").mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        blob = repository / "blobs" / f"{i:040}"
        file.rename(blob)
        file.symlink_to(Path("../../blobs") / blob.name)
    return tmp_path / "hf"


def snapshot(cache: Path) -> Path:
    return cache / "hub" / "models--owner--tiny" / "snapshots" / "0123abcd"


def generate(cache: Path, model: str = "owner/tiny", *args: str, **env: str) -> tuple[int, str]:
    """Exit code and stderr of the command line under the guard."""
    done = subprocess.run(
        [sys.executable, "-c", GUARD, "generate", model, "-p", "x", "-n", "1", "-q", *args],
        env=environment(
            **{"HF_HOME": str(cache), "HF_HUB_OFFLINE": None, "HF_HUB_CACHE": None} | env
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("offline", ["0", "1"])
def test_case_14_a_full_cache_opens_no_socket(cache: Path, offline: str) -> None:
    assert generate(cache, HF_HUB_OFFLINE=offline) == (0, "")


def test_case_14_the_guard_sees_sockets(cache: Path) -> None:
    (snapshot(cache) / "config.json").unlink()
    code, err = generate(cache, HF_ENDPOINT=NOWHERE)
    assert code == 99
    assert err.startswith("socket.")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "model-00002-of-00002.safetensors",
        "model-00001-of-00002.safetensors",
    ],
)
@pytest.mark.parametrize("how", ["never linked", "blob missing"])
def test_case_14_an_interrupted_snapshot_is_incomplete(cache: Path, name: str, how: str) -> None:
    file = snapshot(cache) / name
    if how == "blob missing":
        file.resolve().unlink()
    else:
        file.unlink()
    assert not is_complete(snapshot(cache))


def test_case_14_incomplete_and_offline_says_so(cache: Path) -> None:
    (snapshot(cache) / "model-00002-of-00002.safetensors").unlink()
    code, err = generate(cache, HF_HUB_OFFLINE="1")
    assert code == 4
    assert err.startswith("qrun: error: the cached copy of owner/tiny is incomplete")
    assert len(err.splitlines()) == 2


def test_not_cached_and_offline(cache: Path) -> None:
    code, err = generate(cache, "owner/other", HF_HUB_OFFLINE="1")
    assert code == 3
    assert "owner/other is not in the cache, and HF_HUB_OFFLINE is set" in err


def test_another_revision_is_another_model(cache: Path) -> None:
    code, _ = generate(cache, "owner/tiny", "--revision", "v2", HF_HUB_OFFLINE="1")
    assert code == 3
    (cache / "hub" / "models--owner--tiny" / "refs" / "v2").write_text("0123abcd")
    assert generate(cache, "owner/tiny", "--revision", "v2", HF_HUB_OFFLINE="1") == (0, "")


def test_an_unreachable_hub_is_one_line(cache: Path, python: Callable[..., str]) -> None:
    code = (
        "from qrun.hub import locate\n"
        "from qrun.errors import QrunError\n"
        "import sys\n"
        "for name in ('owner/other', 'owner/tiny'):\n"
        "    try: locate(name)\n"
        "    except QrunError as error: print(error.exit_code, error)\n"
    )
    (snapshot(cache) / "tokenizer.json").unlink()
    lines = python(code, HF_HOME=str(cache), HF_ENDPOINT=NOWHERE, HF_HUB_OFFLINE="").splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("3 owner/other: ")
    assert lines[1].startswith("4 owner/tiny is incomplete")


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path / "owner" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert locate("owner/tiny") == Path("owner/tiny")


def test_the_home_folder_may_be_abbreviated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/model") == tmp_path / "model"


@pytest.mark.parametrize(
    "name", ["./nowhere", "../a/b", "/no/where", "nowhere", "a/b/c", "a b/c", "-a/b", "ü/b"]
)
def test_what_is_neither_folder_nor_hub_id(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        locate(name)


@pytest.mark.parametrize("name", ["a--b/c", "owner/name.", "owner/" + "x" * 120])
def test_hub_ids_that_the_hub_refuses(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        locate(name)


def test_a_gguf_file_is_told_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match="is a file") as caught:
        locate(tmp_path / "a.gguf")
    assert caught.value.hint is not None
    assert "qrun convert" in caught.value.hint


def test_a_broken_index_in_the_cache_is_named(cache: Path) -> None:
    index = snapshot(cache) / "model.safetensors.index.json"
    index.unlink()
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json is not valid JSON"):
        is_complete(snapshot(cache))
    index.write_text(json.dumps({"weight_map": {}}))
    assert not is_complete(snapshot(cache))


def test_only_what_a_run_needs_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the cache, so that it is complete without the rest."""
    import huggingface_hub

    asked: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        raise OSError(f"no {name}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ModelNotFoundError, match="the download failed: no owner/name"):
        locate("owner/name")
    assert asked == [PATTERNS]


def test_code_is_never_downloaded() -> None:
    from fnmatch import fnmatch

    wanted = {
        "config.json": True,
        "model-00001-of-00002.safetensors": True,
        "model.safetensors.index.json": True,
        "tokenizer.model": True,
        "chat_template.jinja": True,
        "modeling_llama.py": False,
        "pytorch_model.bin": False,
        "consolidated.safetensors": False,
        "model-q4.gguf": False,
        "README.md": False,
    }
    for name, want in wanted.items():
        assert any(fnmatch(name, pattern) for pattern in PATTERNS) == want, name
