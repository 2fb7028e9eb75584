"""A model's name -> its folder: a local path, or a Hugging Face repository through its cache."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from qrun.checkpoint import INDEX, SINGLE
from qrun.config import read_json
from qrun.errors import CheckpointError, ModelNotFoundError, UsageError

# Only what a run needs. Never code.
PATTERNS = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model"]
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # not ./folder


def locate(model: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The folder of a model. A complete copy in the cache is used without touching the network.

    Raises ModelNotFoundError if there is no such folder or repository.
    """
    if not isinstance(model, (str, os.PathLike)) or not isinstance(os.fspath(model), str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"a model is a folder or a hub id, not {model!r:.80}")
    if revision is not None and not isinstance(revision, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"a revision is a text, not {revision!r:.80}")
    if not os.fspath(model):
        raise UsageError("no model given")
    path = Path(model).expanduser()
    if path == Path():
        path = path.resolve()  # so that messages name a folder, not "."
    try:
        if path.is_dir():
            return path
        is_file = path.is_file()
    except OSError as error:  # a name too long, or a folder that may not be entered
        raise ModelNotFoundError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if is_file:
        hint = f"give its folder: {path.parent}"
        if path.suffix == ".gguf":
            hint = f"convert it: qrun convert {path} DST"
        raise ModelNotFoundError(f"{path} is a file, not a model folder", hint=hint)
    name = os.fspath(model)
    if not _REPOSITORY.fullmatch(name):
        raise ModelNotFoundError(
            f"{name}: no such folder", hint="give a model folder, or a hub id such as owner/name"
        )
    cached = _snapshot(name, revision, local=True)
    if cached is not None and is_complete(cached):
        return cached
    if _offline():
        if cached is not None:
            raise CheckpointError(
                f"the cached copy of {name} is incomplete, and HF_HUB_OFFLINE is set",
                hint="unset HF_HUB_OFFLINE to finish the download",
            )
        raise ModelNotFoundError(
            f"{name} is not in the cache, and HF_HUB_OFFLINE is set",
            hint=f"there is no folder {name} here either",
        )
    fetched = _snapshot(name, revision, local=False)
    if fetched is None or not is_complete(fetched):
        raise CheckpointError(
            f"{name} is incomplete: it takes config.json, {SINGLE} (or shards) and tokenizer.json"
        )
    return fetched


def is_complete(folder: Path) -> bool:
    """Whether config, weights (all shards of the index) and tokenizer are there."""
    tokenizers = ("tokenizer.json", "tokenizer.model", "tekken.json")
    if not (folder / "config.json").exists() or not any((folder / t).exists() for t in tokenizers):
        return False
    if (folder / INDEX).exists():
        shards = read_json(folder / INDEX).get("weight_map")
        names = set(shards.values()) if isinstance(shards, dict) else set[str]()
        return bool(names) and all((folder / str(name)).exists() for name in names)
    return (folder / SINGLE).exists()


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _snapshot(name: str, revision: str | None, *, local: bool) -> Path | None:
    """The snapshot's folder; None if it is not in the cache and `local` is set."""
    # Imported here: it costs a third of a second, which a local folder need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=PATTERNS, local_files_only=local
            )
        )
    except LocalEntryNotFoundError:
        if local:
            return None
        raise ModelNotFoundError(
            f"{name}: the hub cannot be reached, and the model is not in the cache",
            hint=f"if a folder is meant: there is none named {name} here",
        ) from None
    except GatedRepoError:
        raise ModelNotFoundError(
            f"{name} is gated", hint="accept its terms on the hub, then run: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(f"{name}: no such folder, and no such hub repository") from None
    except RevisionNotFoundError:
        raise ModelNotFoundError(f"{name} has no revision {revision!r}") from None
    except HFValidationError:
        raise ModelNotFoundError(f"{name}: no such folder, and no possible hub id") from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelNotFoundError(
            f"{name}: the download failed: {str(error).splitlines()[0]}"
        ) from None
