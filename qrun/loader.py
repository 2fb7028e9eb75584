"""A folder or hub id -> a model ready to run."""

from __future__ import annotations

import importlib.util
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_args

import mlx.core as mx

from qrun.cache import Cache, CacheSpec, cache_bytes
from qrun.checkpoint import Checkpoint, Tensor
from qrun.config import Config, read_json
from qrun.declared import Declared
from qrun.errors import CheckpointError, UsageError
from qrun.hardware import memory_size, sparing
from qrun.hub import locate
from qrun.ops import _launch
from qrun.ops.matrix import Activations
from qrun.paths import MODELS
from qrun.tokenizer import Tokenizer
from qrun.weights import Weights

# model_type of config.json -> the file in models/, where the names differ
ALIASES = {"gemma3": "gemma3_text", "mistral": "llama"}
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class Model(Protocol):
    """What a file in models/ defines under the name `Model`."""

    cache_specs: Sequence[CacheSpec]

    def __init__(self, config: Config, weights: Weights) -> None: ...
    def __call__(self, ids: mx.array, cache: Cache) -> mx.array:
        """ids (M,) int32 behind the cache's end -> hidden states (M, K)."""
        ...

    def logits(self, x: mx.array) -> mx.array:
        """Hidden states (M, K) -> logits (M, V)."""
        ...


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model, its tokenizer, and what a generation needs to know of both."""

    model: Model
    tokenizer: Tokenizer
    vocab: int  # ids at or above it mean nothing
    folder: Path
    dtype: mx.Dtype
    context: int  # positions the model was made for
    eos: frozenset[int]  # any of these ends the text
    step_bytes: int  # weight bytes that one decode step reads
    load_seconds: float
    notes: list[str] = field(default_factory=list[str])  # for --verbose

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache with room for `capacity` positions. Raises UsageError for far too many."""
        need, room = cache_bytes(self.model.cache_specs, capacity, self.dtype), memory_size()
        if need > room:
            raise UsageError(
                f"a text of {capacity} tokens takes {need / 1e9:.1f} GB of cache, and there are "
                f"{room / 1e9:.1f} GB here",
                hint="ask for fewer tokens: --max-tokens, or max_tokens",
            )
        return Cache(self.model.cache_specs, capacity, self.dtype)


def load(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str | None = None,
    activations: Activations = "default",
    tune: bool | None = None,
    show: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Load a 4-bit model from a folder or a hub id such as "owner/name".

    revision: of the hub repository. dtype: float32, float16 or bfloat16 for activations and cache;
    by default float32 on a CPU, and the checkpoint's 16-bit type on a GPU.
    activations: on a CPU, how products read them. "default" loses nothing that a result shows,
    "exact" keeps float32's 24 bits for 16-bit types too, "int8" keeps 8 (faster, less precise).
    tune: where a backend has kernels to choose from (Metal), time those that this machine has not
    timed yet (None), all of them (True), or none and go by a table (False).
    show: told what takes long, now or at first use (timing on Metal, compiling on CUDA).
    Raises ModelNotFoundError or CheckpointError, each in one line that names the file.
    """
    start = time.perf_counter()
    if dtype is not None and (not isinstance(dtype, str) or dtype not in DTYPES):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"unknown dtype {dtype!r} (known: {', '.join(DTYPES)})")
    if tune not in (None, False, True):
        raise UsageError(f"tune must be None, False or True, not {tune!r:.80}")
    if not callable(show):
        raise UsageError(f"show must be a function of a line, not {show!r:.80}")
    if tune and not _launch.can_tune():
        raise UsageError(f"{_launch.backend().NAME} has no kernels to choose from: nothing to tune")
    _launch.show_by(show)
    folder = locate(model, revision=revision)
    config, build = read_config(folder)
    checkpoint = Checkpoint(folder)
    compute = DTYPES[dtype] if dtype else default_dtype(checkpoint.tensors)
    problem = _launch.native_problem()
    if problem and mx.default_device().type == mx.cpu:
        warnings.warn(f"{problem}: using MLX's own slow CPU product", stacklevel=2)
    if activations not in get_args(Activations):
        raise UsageError(f"activations must be default, exact or int8, not {activations!r}")
    if activations != "default" and _launch.backend().NAME != "cpu":
        raise UsageError(f"activations={activations}: only the CPU's own kernels have a choice")
    context = config.int("max_position_embeddings", 2048)
    with sparing():
        tokenizer = Tokenizer(folder, context)  # first: weights fill the holes it leaves
        weights = Weights(checkpoint, Declared(config), compute, activations=activations)
        built = build(config, weights)  # a matrix is packed while the next ones are read
        weights.finish(folder)
        mx.synchronize()
    notes = grouped(weights.slow)
    if weights.dtype != compute:
        notes.append("computed in bfloat16: the model leaves float16's range")
    ignored = [key for key in config.unread() if key not in HARMLESS]
    if ignored:
        notes.append(f"config.json: not used: {', '.join(ignored)}")
    if tokenizer.template is None:
        notes.append("no chat template: a prompt is given to the model as it is")
    if tune is not False:
        step = partial(untried_step, built, weights.dtype, context)
        notes += _launch.tune(step, again=tune is True, show=show)
    return LoadedModel(
        model=built,
        tokenizer=tokenizer,
        vocab=tokenizer.size_within(config.int("vocab_size")),
        folder=folder,
        dtype=weights.dtype,
        context=context,
        eos=stop_tokens(folder, config, tokenizer),
        step_bytes=weights.step_bytes,
        load_seconds=time.perf_counter() - start,
        notes=notes,
    )


def untried_step(model: Model, dtype: mx.Dtype, context: int, rows: int) -> None:
    """What a step of that many tokens would compute, evaluated by nobody."""
    rows = min(rows, context)
    cache = Cache(model.cache_specs, rows, dtype)
    model.logits(model(mx.zeros((rows,), mx.int32), cache)[-1:])


def read_config(folder: Path) -> tuple[Config, Callable[[Config, Weights], Model]]:
    """config.json, and the class `Model` of models/<model_type>.py.

    Where the text model is one of several, what `text_config` says of it comes in front; behind
    come the architecture's DEFAULTS, if it has any: keys that config.json may leave out.
    """
    path = folder / "config.json"
    config = Config(read_json(path), str(path))
    kind = config.str("model_type")
    module = model_file(kind, config.where)
    text = config.level("text_config")
    inner = {} if text is None else {**text.values, "model_type": kind}
    values = {**getattr(module, "DEFAULTS", {}), **config.values, **inner}
    return Config(values, config.where), module.Model


def model_file(kind: str, where: str) -> Any:
    """The module models/<kind>.py."""
    name = ALIASES.get(kind, kind)
    files = {p.stem: p for p in MODELS.glob("*.py")}
    if name not in files:
        known = sorted({*files, *ALIASES})
        raise CheckpointError(
            f"{where}: architecture {kind!r:.80} is not supported (known: {', '.join(known)})",
            hint="update qrun, or take a model of one of these",
        )
    spec = importlib.util.spec_from_file_location(f"qrun_models_{name}", files[name])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grouped(notes: Sequence[str]) -> list[str]:
    """Notes "path: what" that differ only in a layer's number become one."""
    found: dict[str, list[str]] = {}
    for note in notes:
        layer = re.search(r"\blayers\.(\d+)\.", note)
        key = note if layer is None else note.replace(layer[0], "layers.*.", 1)
        found.setdefault(re.sub(r"\bexperts\.\d+\.", "experts.*.", key), []).append(note)
    return [ns[0] if len(ns) == 1 else f"{key} ({len(ns)} times)" for key, ns in found.items()]


def default_dtype(tensors: Mapping[str, Tensor]) -> mx.Dtype:
    """float32 on a CPU; on a GPU the type of the scales, or of the norms in a dense checkpoint."""
    if mx.default_device().type == mx.cpu or _launch.backend().NAME == "mlx":
        return mx.float32
    types = {"F16": mx.float16, "BF16": mx.bfloat16}
    for ending in (".scales", "norm.weight", ".weight"):
        for name, tensor in tensors.items():
            if name.endswith(ending) and tensor.dtype in types:
                return types[tensor.dtype]
    return mx.float32


def stop_tokens(folder: Path, config: Config, tokenizer: Tokenizer) -> frozenset[int]:
    """The union of what config.json, generation_config.json and the tokenizer call the end."""
    ids = set(config.ints("eos_token_id"))
    path = folder / "generation_config.json"
    if os.path.lexists(path):
        try:
            ids |= set(Config(read_json(path), str(path)).ints("eos_token_id"))
        except CheckpointError as error:
            warnings.warn(f"ignored: {error}", stacklevel=2)
    if tokenizer.eos is not None:
        ids.add(tokenizer.eos)
    return frozenset(ids)


# Keys that describe training, bookkeeping or other software: ignoring them changes no result. And
# intermediate_size: what has a dense MLP asks for it, and a mixture in every layer has none.
HARMLESS = frozenset(
    {
        "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "auto_map",
        "bos_token_id", "cache_implementation", "dtype", "embd_pdrop", "eos_token_id",
        "hidden_dropout", "initializer_range", "intermediate_size", "is_llama_config",
        "layer_types", "max_window_layers", "model_type", "output_router_logits", "pad_token_id",
        "pretraining_tp", "quantization", "quantization_config", "resid_pdrop",
        "rope_interleaved", "router_aux_loss_coef", "router_jitter_noise", "text_config",
        "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version",
        "unsloth_fixed", "unsloth_version", "use_cache", "vision_config",
    }
)  # fmt: skip
