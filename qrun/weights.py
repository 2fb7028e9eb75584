"""Tensors by name -> parameters, strictly: every tensor is asked for once and nothing is left over.

A model is built by asking a `Weights` for its parameters. Problems are collected, so that one run
lists them all. What a matrix is stored as is read off its shapes and compared with config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, cast

import mlx.core as mx

from qrun.checkpoint import Tensor
from qrun.config import Config
from qrun.errors import CheckpointError
from qrun.layers import AnyLinear, Embedding, Linear, QuantizedLinear, RMSNorm, Stacked
from qrun.ops import QuantizedMatrix
from qrun.quantization import MODES, Quantization, infer

SHOWN = 8  # problems listed before "and N more"


class Source(Protocol):
    """Where tensors come from; `qrun.checkpoint.Checkpoint` is one."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    def read(self, name: str) -> mx.array: ...
    def release(self) -> None: ...


class Weights:
    """A view on a source under a name prefix. `at()` goes one level down; all views share state."""

    def __init__(
        self,
        source: Source,
        declared: Declared,
        dtype: mx.Dtype,
        *,
        prefix: str = "",
        root: Weights | None = None,
    ) -> None:
        self.source = source
        self.declared = declared
        self.dtype = dtype
        self.prefix = prefix
        self._root = root or self
        if root is None:
            self.problems: list[str] = []
            self.taken: set[str] = set()
            self.slow: list[str] = []  # stacks whose parts differ in format

    def at(self, name: str) -> Weights:
        """The view one level down: names below are relative to `name`."""
        return Weights(
            self.source, self.declared, self.dtype, prefix=f"{self.prefix}{name}.", root=self._root
        )

    def vector(self, name: str, n: int) -> mx.array:
        """A dense tensor (n,), in its own type."""
        array = self._take(self.prefix + name, (n,))
        return mx.zeros((n,)) if array is None else array

    def norm(self, name: str, k: int, eps: float, *, plus_one: bool = False) -> RMSNorm:
        """The RMS norm `name.weight` (k,); plus_one: the checkpoint stores weight - 1 (gemma)."""
        weight = self.vector(f"{name}.weight", k).astype(mx.float32)
        return RMSNorm(weight + 1 if plus_one else weight, eps)

    def linear(
        self, *names: str, n: tuple[int, ...], k: int, bias: bool = False, interleave: bool = False
    ) -> AnyLinear:
        """One linear, or several over the same x as one matrix: rows stacked or interleaved.

        Part i is `names[i]`, n[i] x k. Parts whose formats differ stay separate (right, slower).
        """
        parts = [self._part(name, rows, k, bias) for name, rows in zip(names, n, strict=True)]
        joined = parts[0] if len(parts) == 1 else self._join(parts, interleave, names)
        if isinstance(joined, Stacked):
            joined = Stacked(tuple(_packed(p) for p in joined.parts), joined.interleave)
        else:
            joined = _packed(joined)
        self.source.release()
        return joined

    def embedding(self, name: str, n: int, k: int) -> Embedding:
        """The embedding table `name`, n x k."""
        part = _packed(self._part(name, n, k, bias=False))
        self.source.release()
        if isinstance(part, QuantizedLinear):
            return Embedding(part.matrix, self.dtype)
        return Embedding(part.weight, self.dtype)

    def has(self, name: str) -> bool:
        """Whether the source holds a tensor of this name."""
        return self.prefix + name in self.source.tensors

    def drop(self, name: str) -> None:
        """Tensors below `name` may be there and are not needed."""
        at = self.prefix + name
        self._root.taken |= {t for t in self.source.tensors if t == at or t.startswith(at + ".")}

    def finish(self, folder: object) -> None:
        """Raise CheckpointError listing everything missing, mis-shaped or left over."""
        root = self._root
        ignored = ("rotary_emb.inv_freq",)
        left = sorted(
            t for t in self.source.tensors if t not in root.taken and not t.endswith(ignored)
        )
        problems = root.problems + [f"{name} is unexpected" for name in left]
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise CheckpointError(
                f"{folder} does not fit its config.json: {'; '.join(problems[:SHOWN])}{more}"
            )

    def _take(self, name: str, shape: tuple[int, ...] | None) -> mx.array | None:
        """Tensor `name`, None (and a problem noted) if it is missing or has another shape."""
        root = self._root
        tensor = self.source.tensors.get(name)
        if tensor is None:
            root.problems.append(f"{name} is missing")
            return None
        root.taken.add(name)
        if shape is not None and tensor.shape != shape:
            root.problems.append(f"{name} has shape {list(tensor.shape)}, must be {list(shape)}")
            return None
        return self.source.read(name)

    def _part(self, name: str, n: int, k: int, bias: bool) -> QuantizedLinear | Linear:
        path = self.prefix + name
        offset = self._take(f"{path}.bias", (n,)) if bias else None
        declared = self.declared.of(path)
        if declared is False:
            self.drop(f"{name}.scales")
            self.drop(f"{name}.biases")
        if declared is False or not self.has(f"{name}.scales"):
            weight = self._take(f"{path}.weight", (n, k))
            return Linear(mx.zeros((n, 1)) if weight is None else weight, offset)
        matrix = self._matrix(path, n, k, declared)
        if matrix is None:
            return Linear(mx.zeros((n, 1)), offset)
        return QuantizedLinear(matrix, offset)

    def _matrix(
        self, path: str, n: int, k: int, declared: Quantization | None
    ) -> QuantizedMatrix | None:
        tensors, problems = self.source.tensors, self._root.problems
        w, scales = tensors.get(f"{path}.weight"), tensors[f"{path}.scales"]
        if w is None or w.dtype != "U32":
            self._root.taken.update((f"{path}.weight", f"{path}.scales", f"{path}.biases"))
            kind = "missing" if w is None else f"of type {w.dtype}, must be U32"
            problems.append(f"{path}.weight is {kind}")
            return None
        try:
            spec = infer(k, w.shape, scales.shape, float_scales=scales.dtype != "U8")
        except ValueError as error:
            self._root.taken.update((f"{path}.weight", f"{path}.scales", f"{path}.biases"))
            problems.append(f"{path}: {error}")
            return None
        if declared is not None and declared != spec:
            problems.append(
                f"{path}.weight is {spec} by its shape, but config.json says {declared}"
            )
        groups = (n, k // spec.group_size)
        arrays = [
            self._take(f"{path}.weight", (n, k * spec.bits // 32)),
            self._take(f"{path}.scales", groups),
            self._take(f"{path}.biases", groups) if spec.mode == "affine" else None,
        ]
        if any(a is None for a in arrays[: 3 if spec.mode == "affine" else 2]):
            return None
        weight, scale, offset = arrays
        assert weight is not None
        assert scale is not None
        if offset is not None and offset.dtype != scale.dtype:
            types = [str(a.dtype).removeprefix("mlx.core.") for a in (offset, scale)]
            problems.append(f"{path}.biases is {types[0]}, but scales are {types[1]}")
            return None
        return QuantizedMatrix.of(weight, scale, offset, spec)

    def _join(
        self,
        parts: list[QuantizedLinear | Linear],
        interleave: bool,
        names: tuple[str, ...],
    ) -> AnyLinear:
        bias = None
        biases = [p.bias for p in parts if p.bias is not None]
        if biases:
            bias = mx.stack(biases, 1).reshape(-1) if interleave else mx.concatenate(biases)
        matrices = [p.matrix for p in parts if isinstance(p, QuantizedLinear)]
        same = len({(m.spec, m.k, m.scale_dtype) for m in matrices}) == 1
        if len(matrices) == len(parts) and same:
            whole = matrices[0]
            if interleave:
                whole = whole.stacked(matrices[1], interleave=True)
            else:
                for matrix in matrices[1:]:
                    whole = whole.stacked(matrix)
            return QuantizedLinear(whole, bias)
        self._root.slow.append(f"{self.prefix}{{{','.join(names)}}}")
        return Stacked(tuple(parts), interleave)


def _packed(part: QuantizedLinear | Linear) -> QuantizedLinear | Linear:
    return (
        QuantizedLinear(part.matrix.pack(), part.bias)
        if isinstance(part, QuantizedLinear)
        else part
    )


class Declared:
    """What config.json says of quantization: a global entry, and entries per module path."""

    def __init__(self, config: Config) -> None:
        # Ours alone is called `quantization`; under the other name any software's may stand, with
        # bits and group_size that mean another format.
        level = config.level("quantization")
        if level is None:
            level = config.level("quantization_config")
            method = "mlx" if level is None else level.str("quant_method", "mlx")
            if level is not None and method != "mlx":
                raise CheckpointError(
                    f"{level.where}: quantization method {method!r} is not supported",
                    hint="qrun reads MLX's formats: affine, mxfp4, nvfp4, mxfp8",
                )
        self.default: Quantization | None = None
        self.layers: dict[str, Quantization | Literal[False]] = {}
        if level is None:
            return
        self.default = _spec(level)
        for key, value in level.values.items():
            name = key.removeprefix("language_model.")
            if isinstance(value, dict):
                where = f"{level.where}: {key}"
                entry = Config(cast("dict[str, Any]", value), where)
                if "bits" in entry or "group_size" in entry or "mode" in entry:
                    self.layers[name] = _spec(entry)
            elif value is False:
                self.layers[name] = False

    def of(self, path: str) -> Quantization | Literal[False] | None:
        """The entry for a module; False: dense; None: config.json says nothing."""
        return self.layers.get(path, self.default)


def _spec(level: Config) -> Quantization:
    """An entry's spec; missing numbers are the mode's defaults."""
    mode = level.str("mode", "affine")
    if mode not in MODES:
        raise CheckpointError(f"{level.where}: unknown mode {mode!r} (known: {', '.join(MODES)})")
    group, bits = MODES[mode]
    try:
        return Quantization(level.int("bits", bits), level.int("group_size", group), mode)
    except ValueError as error:
        raise CheckpointError(f"{level.where}: {error}") from None
