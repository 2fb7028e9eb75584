"""What a checkpoint is and whether it would load, from config and headers alone.

The model is built as for a run, but out of arrays that are never computed: so every check of a
real load happens, and all problems of a kind are found at once.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from qrun.cache import cache_bytes
from qrun.chat import render
from qrun.checkpoint import INDEX, Tensor, check_index, mlx_type, read_header, weight_files
from qrun.config import Config
from qrun.declared import Declared
from qrun.errors import CheckpointError, QrunError, one_line
from qrun.hardware import memory_size
from qrun.hub import locate
from qrun.loader import default_dtype, grouped, read_config, stop_tokens
from qrun.quantization import Quantization
from qrun.tokenizer import Tokenizer
from qrun.weights import MISFIT, Weights


@dataclass(frozen=True)
class Problem:
    """Something that keeps the checkpoint from loading, and what to do about it."""

    text: str
    remedy: str


@dataclass
class Kind:
    """All matrices of one name, such as every layer's q_proj."""

    name: str
    count: int = 0
    parameters: int = 0
    nbytes: int = 0
    formats: dict[str, int] = field(default_factory=dict[str, int])  # format -> how many have it

    @property
    def bits(self) -> float:
        """Bits per weight, scales and biases included."""
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0


@dataclass
class Report:
    """Findings on one folder. Numbers are 0 where a problem kept them from being found."""

    folder: Path
    architecture: str = ""
    context: int = 0  # positions the model was made for
    length: int = 0  # positions that `cache_bytes` is for
    parameters: int = 0
    weight_bytes: int = 0
    step_bytes: int = 0
    cache_bytes: int = 0
    dtype: str = ""
    kinds: list[Kind] = field(default_factory=list[Kind])
    stop_tokens: list[int] = field(default_factory=list[int])
    template: str = "none: a prompt is given as it is"
    problems: list[Problem] = field(default_factory=list[Problem])
    notes: list[str] = field(default_factory=list[str])

    @property
    def loads(self) -> bool:
        return not self.problems

    @property
    def exit_code(self) -> int:
        """0, or that of a failing load."""
        return 0 if self.loads else CheckpointError.exit_code

    @property
    def bits(self) -> float:
        """Bits per weight of the whole model."""
        return 8 * self.weight_bytes / self.parameters if self.parameters else 0.0

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        kinds = [{**asdict(kind), "bits": round(kind.bits, 3)} for kind in self.kinds]
        rest = {"folder": str(self.folder), "kinds": kinds, "bits": round(self.bits, 3)}
        return {**asdict(self), **rest, "loads": self.loads}


class HeaderSource:
    """Tensors that have a shape and a type, and values only if somebody computed them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str) -> mx.array:
        tensor = self.tensors[name]
        return mx.zeros(tensor.shape, mlx_type(name, tensor))

    def release(self) -> None:
        """There is nothing to give back."""


def inspect(model: str | os.PathLike[str], *, length: int | None = None) -> Report:
    """Look at a folder or a hub id. length: positions to plan memory for; by default the context.

    Raises ModelNotFoundError; everything else that is wrong becomes a Problem.
    """
    report = Report(locate(model))
    tensors = _headers(report)
    try:
        config, build = read_config(report.folder)
    except CheckpointError as error:
        _add(report, error)
        config, build = None, None
    if config is not None and build is not None:
        report.architecture = config.str("model_type")
        try:
            report.context = config.int("max_position_embeddings", 2048)
            report.length = length or report.context
            if report.length > report.context:
                report.notes.append(
                    f"{report.length} positions are more than the {report.context} that the model "
                    "was made for"
                )
            if tensors:
                weights = Weights(
                    HeaderSource(tensors), Declared(config), default_dtype(tensors), pack=False
                )
                built = build(config, weights)
                _describe(report, weights, built.cache_specs)
        except CheckpointError as error:
            _add(report, error)
    _text(report, config)
    return report


def _add(report: Report, error: QrunError) -> None:
    problem = Problem(str(error), error.hint or "download config.json again")
    if problem not in report.problems:
        report.problems.append(problem)


def _headers(report: Report) -> dict[str, Tensor]:
    """All tensors; empty if any file has a problem, since everything else would follow from it."""
    folder = report.folder
    found: dict[str, Tensor] = {}
    try:
        files = weight_files(folder)
    except CheckpointError as error:
        _add(report, error)
        files = sorted(folder.glob("model*.safetensors"))
    for path in files:
        try:
            found |= read_header(path)
        except CheckpointError as error:
            _add(report, error)
    if not report.problems and (folder / INDEX).exists():
        try:
            check_index(folder, found)
        except CheckpointError as error:
            _add(report, error)
    return {} if report.problems else found


def _describe(report: Report, weights: Weights, specs: Any) -> None:
    """Sizes and formats of a model that was built, and what does not fit."""
    kinds: dict[str, Kind] = {}
    tensors = weights.source.tensors
    for path, (parameters, how) in weights.formats.items():
        kind = kinds.setdefault(kind_of(path), Kind(kind_of(path)))
        kind.count += 1
        kind.parameters += parameters
        parts = [tensors.get(f"{path}.{part}") for part in ("weight", "scales", "biases")]
        kind.nbytes += sum(t.stop - t.start for t in parts if t is not None)
        name = str(how) if isinstance(how, Quantization) else _name(how)
        kind.formats[name] = kind.formats.get(name, 0) + 1
    rest = weights.nbytes - sum(kind.nbytes for kind in kinds.values())
    vectors = Kind("norms and biases")
    for name in weights.taken - weights.dropped:
        path, _, last = name.rpartition(".")
        if path not in weights.formats or last == "bias":
            vectors.count += 1
            vectors.parameters += tensors[name].shape[0] if tensors[name].shape else 1
    vectors.nbytes = rest
    report.kinds = [*kinds.values(), vectors]
    report.parameters = sum(kind.parameters for kind in report.kinds)
    report.weight_bytes = weights.nbytes
    report.step_bytes = weights.step_bytes
    report.dtype = _name(weights.dtype)
    report.cache_bytes = cache_bytes(specs, report.length, weights.dtype)
    room = memory_size()
    if weights.nbytes + report.cache_bytes > room:
        report.notes.append(
            f"weights and {report.length} positions take more than the {room / 1e9:.1f} GB here"
        )
    report.notes += grouped(weights.slow)
    report.problems += [Problem(one_line(text), MISFIT) for text in weights.all_problems()]


def kind_of(path: str) -> str:
    """model.layers.7.mlp.experts.3.w1 -> experts.w1; otherwise the last name."""
    names = [n for n in path.split(".") if not re.fullmatch(r"\d+", n)]
    expert = len(names) > 1 and names[-2] in ("experts", "switch_mlp")
    return ".".join(names[-2:]) if expert else names[-1]


def _text(report: Report, config: Config | None) -> None:
    """Tokenizer, template and stop tokens."""
    folder = report.folder
    try:
        tokenizer = Tokenizer(folder)
    except CheckpointError as error:
        _add(report, error)
        return
    if tokenizer.template is not None:
        in_file = (folder / "chat_template.jinja").exists()
        report.template = "chat_template.jinja" if in_file else "tokenizer_config.json"
        try:
            render(tokenizer.template, [{"role": "user", "content": "Hi"}], tokenizer.special)
        except QrunError as error:
            rest = "" if isinstance(error, CheckpointError) else " (for a single message)"
            report.notes.append(f"{error}{rest}; {error.hint}")
    if config is None:
        return
    vocab, ids = config.values.get("vocab_size"), tokenizer.inner.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    if isinstance(vocab, int) and size > vocab:
        report.notes.append(
            f"the tokenizer has {size} tokens, the model {vocab}: no prompt may hold the others"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            report.stop_tokens = sorted(stop_tokens(folder, config, tokenizer))
        except CheckpointError as error:
            _add(report, error)
    report.notes += [str(warning.message) for warning in caught]
    never = [str(i) for i in report.stop_tokens if i >= size]
    if never:
        report.notes.append(
            f"stop tokens that are none of the tokenizer's {size}: {', '.join(never)}"
        )
    if len(never) == len(report.stop_tokens):
        report.notes.append("no stop token: a text ends only at its longest")


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
