"""What a conversion reads: tensors that give their rows, a config, the tokenizer's files.

`read_folder` reads a Hugging Face folder of float safetensors; gguf_models.py reads a GGUF.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from qrun.errors import CheckpointError
from qrun.safetensors_io import TensorView, read_safetensors

Bytes = npt.NDArray[np.uint8]
FLOATS = ("F32", "F16", "BF16")
INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
# Activations of these models pass the largest float16
_WIDE_RANGE = ("gemma", "gemma2", "gemma3", "gemma3_text")


@dataclass(frozen=True)
class SourceTensor:
    """A tensor under its final name; `rows(i, j)` are the raw bytes of its rows i..j-1.

    A matrix has N rows, stacked matrices (E, N, K) have E*N, a vector (n,) has n rows of one.
    """

    name: str
    shape: tuple[int, ...]
    stored: str  # F32, F16, BF16, an integer type, or a GGUF block type
    rows: Callable[[int, int], Bytes]
    add: float = 0.0  # added to every element

    @property
    def row_count(self) -> int:
        return int(np.prod(self.shape[:-1])) if len(self.shape) > 1 else self.size

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Source:
    kind: str  # "gguf" or "huggingface"
    path: Path
    config: dict[str, Any]  # config.json, without what the conversion decides
    tensors: list[SourceTensor]
    dtype: str  # the 16-bit type this model is best kept in
    texts: dict[str, str] = field(default_factory=dict[str, str])  # file name -> content
    copies: list[Path] = field(default_factory=list[Path])
    notes: list[str] = field(default_factory=list[str])


def sixteen_bit_type(model_type: str, declared: str | None, tensors: list[SourceTensor]) -> str:
    """The declared 16-bit type, else the commonest; float32 becomes float16 where that is safe."""
    if declared in ("float16", "bfloat16"):
        return declared
    sizes = Counter[str]()
    for t in tensors:
        if t.stored in ("F16", "BF16"):
            sizes[t.stored] += t.size
    if model_type in _WIDE_RANGE or sizes["BF16"] > sizes["F16"]:
        return "bfloat16"
    return "float16"


def read_folder(path: Path) -> Source:
    config = read_json(path / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{path / 'config.json'}: no model_type")
    for key in ("quantization", "quantization_config"):
        if config.get(key):
            raise CheckpointError(
                f"{path}: already quantized ({key} in config.json)",
                hint="convert the float checkpoint it was made from",
            )
    config.pop("auto_map", None)  # names Python files, which are never copied
    views = _read_tensors(path)
    if config.get("tie_word_embeddings") is True:
        views.pop("lm_head.weight", None)
    tensors = [
        _from_view(name, view)
        for name, view in views.items()
        if not name.endswith("rotary_emb.inv_freq")
    ]
    declared = config.get("torch_dtype", config.get("dtype"))
    notes: list[str] = []
    if not (path / "tokenizer.json").is_file():
        notes.append("the source has no tokenizer.json, so the result has none")
    copies = [path / name for name in SMALL_FILES if (path / name).is_file()]
    dtype = sixteen_bit_type(model_type, declared, tensors)
    return Source("huggingface", path, config, tensors, dtype, copies=copies, notes=notes)


def read_json(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: missing", hint="give a .gguf file, or a folder with config.json"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return cast(dict[str, Any], found)


def _from_view(name: str, view: TensorView) -> SourceTensor:
    shape = view.shape if view.shape else (1,)
    count = shape[0] if len(shape) == 1 else int(np.prod(shape[:-1]))
    raw = view.data.reshape(count, -1) if count else view.data.reshape(0, 1)
    return SourceTensor(name, shape, view.dtype, lambda i, j: raw[i:j])


def _read_tensors(path: Path) -> dict[str, TensorView]:
    """Every tensor of the folder, by name, with the index held against the disk both ways."""
    files = sorted(path.glob("model*.safetensors"))
    index_path = path / INDEX
    if not index_path.is_file():
        if not files:
            raise CheckpointError(
                f"{path}: no model.safetensors",
                hint="qrun reads GGUF files and safetensors folders, not PyTorch .bin or .pth",
            )
        if len(files) > 1 or re.search(r"-of-\d+\.safetensors$", files[0].name):
            raise CheckpointError(
                f"{files[0]}: a shard, but {INDEX} is missing",
                hint="download the index too, and all shards it names",
            )
        return dict(sorted(read_safetensors(files[0]).items()))
    listing = read_json(index_path).get("weight_map")
    if not isinstance(listing, dict):
        raise CheckpointError(f"{index_path}: no weight_map")
    places = {str(name): str(file) for name, file in cast(dict[str, Any], listing).items()}
    named = set(places.values())
    for name in sorted(named):
        if not (path / name).is_file() or Path(name).name != name:
            raise CheckpointError(
                f"{path / name}: missing, but {INDEX} names it", hint="download that file"
            )
    for stray in (f for f in files if f.name not in named):
        raise CheckpointError(
            f"{stray}: not named in {INDEX}", hint="remove it, or download the whole folder again"
        )
    found: dict[str, TensorView] = {}
    for name in sorted(named):
        views = read_safetensors(path / name)
        listed = {t for t, file in places.items() if file == name}
        for wrong in sorted(listed ^ views.keys()):
            where = "is not in the file" if wrong in listed else f"is not listed in {INDEX}"
            raise CheckpointError(f"{path / name}: tensor {wrong} {where}")
        found |= views
    return dict(sorted(found.items()))
