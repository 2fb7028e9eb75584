"""What a conversion reads: tensors that give their rows, a config, the tokenizer's files.

`read_folder` reads a Hugging Face folder of float safetensors; gguf_models.py reads a GGUF.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qrun.checkpoint import Checkpoint, Tensor
from qrun.config import read_json, refuse_non_files
from qrun.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]
FLOATS = ("F32", "F16", "BF16")
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
_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # mixtral's
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
        return prod(self.shape[:-1]) if len(self.shape) > 1 else self.size

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def size(self) -> int:
        return prod(self.shape)


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
    found = Checkpoint(path).tensors
    packed = next((n for n in found if n.endswith(".scales")), None)
    if packed:
        raise CheckpointError(
            f"{path}: already quantized ({packed})",
            hint="convert the float checkpoint it was made from",
        )
    if config.get("tie_word_embeddings") is True:
        found.pop("lm_head.weight", None)
    files = {file: _map(file) for file in {t.file for t in found.values()}}
    tensors = [
        _rows(files[t.file], name, t)
        for name, t in sorted(found.items(), key=lambda item: natural(item[0]))
        if t.start < t.stop and not name.endswith("rotary_emb.inv_freq")
    ]
    tensors = stack_experts(path, tensors)
    for name in SMALL_FILES:
        refuse_non_files(path / name)
    declared = config.get("torch_dtype", config.get("dtype"))
    notes: list[str] = []
    if not (path / "tokenizer.json").is_file():
        notes.append("the source has no tokenizer.json, so the result has none")
    copies = [path / name for name in SMALL_FILES if (path / name).is_file()]
    dtype = sixteen_bit_type(model_type, declared, tensors)
    return Source("huggingface", path, config, tensors, dtype, copies=copies, notes=notes)


def stack_experts(path: Path, tensors: list[SourceTensor]) -> list[SourceTensor]:
    """Experts listed one by one (N, K) as the one stack (E, N, K) of the MLX community's files."""
    stacks: dict[str, list[SourceTensor]] = {}
    for t in tensors:
        found = re.fullmatch(r"(.+)\.experts\.(\d+)\.(\w+)\.weight", t.name)
        name = t.name
        if found:
            projection = _EXPERT_NAMES.get(found[3], found[3])
            name = f"{found[1]}.switch_mlp.{projection}.weight"
            if int(found[2]) != len(stacks.get(name, [])):
                raise CheckpointError(f"{path}: an expert is missing before {t.name}")
        stacks.setdefault(name, []).append(t)
    return [
        _stack(path, name, parts) if name != parts[0].name else parts[0]
        for name, parts in stacks.items()
    ]


def _stack(path: Path, name: str, parts: list[SourceTensor]) -> SourceTensor:
    first = parts[0]
    for t in parts:
        if (t.shape, t.stored) != (first.shape, first.stored) or len(t.shape) != 2:
            raise CheckpointError(f"{path}: {t.name} and {first.name} differ in shape or type")
    n = first.shape[0]

    def rows(i: int, j: int) -> Bytes:
        pieces = [
            parts[e].rows(max(i - e * n, 0), min(j - e * n, n)) for e in range(i // n, -(-j // n))
        ]
        return np.concatenate(pieces)

    return SourceTensor(name, (len(parts), *first.shape), first.stored, rows)


def _map(path: Path) -> Bytes:
    return np.memmap(path, dtype=np.uint8, mode="r")


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _rows(file: Bytes, name: str, t: Tensor) -> SourceTensor:
    shape = t.shape if t.shape else (1,)
    raw = file[t.start : t.stop].reshape(prod(shape) // shape[-1] if shape[1:] else shape[0], -1)
    return SourceTensor(name, shape, t.dtype, lambda i, j: raw[i:j])
