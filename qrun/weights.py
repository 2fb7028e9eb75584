"""Tensors by name -> parameters, strictly: every tensor is asked for once and nothing is left over.

A model is built by asking a `Weights` for its parameters. Problems are collected, so that one run
lists them all. What a matrix is stored as is read off its shapes and compared with config.json.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import NoReturn, Protocol

import mlx.core as mx

from qrun.checkpoint import Tensor
from qrun.declared import Declared
from qrun.errors import CheckpointError
from qrun.layers import (
    AnyLinear,
    DenseExperts,
    Embedding,
    Experts,
    LayerNorm,
    Linear,
    QuantizedLinear,
    RMSNorm,
    Stacked,
)
from qrun.ops import QuantizedMatrix, _launch
from qrun.ops.matrix import Activations
from qrun.parts import float_scales, join, pairs_apart, take_rows
from qrun.quantization import Quantization, infer

ENOUGH = 500  # problems after which none is looked for
MOST_MISSED = 50_000  # tensors, more than any model has
SHOWN = 8  # problems listed before "and N more"
MISFIT = "convert or download it again: config.json and weights are not of one model"


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
        pack: bool = True,
        activations: Activations = "default",
        prefix: str = "",
        root: Weights | None = None,
    ) -> None:
        self.source = source
        self.declared = declared
        self.dtype = dtype
        self.prefix = prefix
        self._root = root or self
        self._absent = False  # nothing lies below: said once, not for every tensor
        if root is None:
            self.pack = pack  # False: leave matrices as the file has them, nothing is evaluated
            self.activations: Activations = activations  # of all products
            self.problems: list[str] = []
            self.missed = 0  # tensors of what is missing whole, which is one problem
            self.names = sorted(source.tensors)
            self.taken: set[str] = set()
            self.dropped: set[str] = set()  # taken, but not needed
            self.unread = 0.0  # bytes of parameters that a decode step does not read
            self.slow: list[str] = []  # what takes a slower way than a fused kernel, and why
            # module path -> parameters, and how they are stored
            self.formats: dict[str, tuple[int, Quantization | mx.Dtype]] = {}

    def at(self, name: str) -> Weights:
        """The view one level down: names below are relative to `name`."""
        view = Weights(
            self.source, self.declared, self.dtype, prefix=f"{self.prefix}{name}.", root=self._root
        )
        names = self._root.names
        first = bisect_left(names, view.prefix)
        view._absent = first == len(names) or not names[first].startswith(view.prefix)
        if view._absent and not self._absent:
            self._note(f"{view.prefix}* is missing, all of it")
        return view

    def need_range(self) -> None:
        """Compute in bfloat16 where float16 was asked for: the model leaves float16's range."""
        if self._root.dtype == mx.float16:
            self._root.dtype = self.dtype = mx.bfloat16

    def vector(self, name: str, n: int) -> mx.array:
        """A dense tensor (n,), in its own type."""
        array = self._take(self.prefix + name, (n,))
        return mx.zeros((n,)) if array is None else array

    def norm(self, name: str, k: int, eps: float, *, plus_one: bool = False) -> RMSNorm:
        """The RMS norm `name.weight` (k,); plus_one: the checkpoint stores weight - 1 (gemma)."""
        weight = self.vector(f"{name}.weight", k).astype(mx.float32)
        return RMSNorm(self._ready(weight + 1 if plus_one else weight), eps)

    def layer_norm(self, name: str, k: int, eps: float) -> LayerNorm:
        """The layer norm `name.weight` (k,), without a bias."""
        return LayerNorm(self._ready(self.vector(f"{name}.weight", k).astype(mx.float32)), eps)

    def linear(
        self,
        *names: str,
        n: tuple[int, ...],
        k: int,
        bias: bool = False,
        interleave: bool = False,
        pairs: tuple[int, ...] | None = None,
    ) -> AnyLinear:
        """One linear, or several over the same x as one matrix: rows stacked or interleaved.

        Part i is `names[i]`, n[i] x k. A single name with `interleave` is a matrix that the file
        holds fused: its upper half is interleaved with its lower. pairs: for each part the dims D
        of its heads if rows 2i and 2i+1 of a head are to come to lie at i and i + D/2, else 0.
        Parts whose formats differ stay separate (right, slower).
        """
        self._refuse_endless(names[0], sum(n))
        parts = [self._part(name, rows, k, bias) for name, rows in zip(names, n, strict=True)]
        if pairs is not None and not self._root.problems:
            parts = [
                take_rows(part, pairs_apart(rows, d)) if d else part
                for part, rows, d in zip(parts, n, pairs, strict=True)
            ]
        if interleave and len(parts) == 1:
            half = n[0] // 2
            parts = [take_rows(parts[0], slice(0, half)), take_rows(parts[0], slice(half, n[0]))]
        joined = parts[0] if len(parts) == 1 else self._join(parts, interleave, names)
        if isinstance(joined, Stacked):
            joined = Stacked(tuple(self._packed(p) for p in joined.parts), joined.interleave)
        else:
            joined = self._packed(joined)
        self.source.release()
        return joined

    def experts(
        self, *names: tuple[str, str], count: int, n: int, k: int
    ) -> Experts | DenseExperts:
        """`count` experts, each n x k: stacked as `switch_mlp.A`, or listed as `experts.N.B`.

        names: the pairs (A, B). Two of them, gate and up, become one with their rows interleaved.
        """
        self._refuse_endless(names[0][0], count * n * len(names))
        parts = [self._expert_part(a, b, count, n, k) for a, b in names]
        path = f"{self.prefix}{{{','.join(a for a, _ in names)}}}"
        if len(parts) == 2:
            whole = self._join(parts, True, tuple(a for a, _ in names))
            if isinstance(whole, Stacked):
                self._note(f"{path}: experts of several formats are not supported")
                whole = Linear(mx.zeros((count, 1)))
        else:
            whole = parts[0]
        self.source.release()
        if isinstance(whole, Linear):
            width = whole.weight.shape[1]
            return DenseExperts(self._ready(whole.weight.reshape(count, -1, width)))
        assert isinstance(whole, QuantizedLinear)
        if _launch.backend().GATHERS:
            if self._computes:
                whole = QuantizedLinear(whole.matrix.pack(count))
        else:
            self._root.slow.append(f"{path}: no kernel for experts here, MLX's own op runs")
            # MLX's op wants scales in the type of x: converted here once, not in every step.
            whole = QuantizedLinear(float_scales(whole.matrix))
            if self._computes:
                mx.async_eval(whole.matrix.w, whole.matrix.scales, whole.matrix.biases)
        return Experts(whole.matrix, count)

    def embedding(self, name: str, n: int, k: int) -> Embedding:
        """The embedding table `name`, n x k."""
        part = self._packed(self._part(name, n, k, bias=False))
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
        found = {t for t in self.source.tensors if t == at or t.startswith(at + ".")}
        self._root.taken |= found
        self._root.dropped |= found

    def seldom(self, *names: str, share: float) -> None:
        """A decode step reads this share of what lies below `names`: rows, or chosen experts."""
        for name in names:
            at = f"{self.prefix}{name}."
            below = [t for n, t in self.source.tensors.items() if n.startswith(at)]
            self._root.unread += (1 - share) * sum(t.stop - t.start for t in below)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters asked for so far."""
        tensors, root = self.source.tensors, self._root
        return sum(tensors[n].stop - tensors[n].start for n in root.taken - root.dropped)

    @property
    def step_bytes(self) -> int:
        """Bytes of parameters that a decode step reads."""
        return self.nbytes - int(self._root.unread)

    def all_problems(self) -> list[str]:
        """Everything missing, mis-shaped or left over, each in a line."""
        root = self._root
        ignored = ("rotary_emb.inv_freq",)
        left = sorted(
            t for t in self.source.tensors if t not in root.taken and not t.endswith(ignored)
        )
        return root.problems + [f"{name:.200} is unexpected" for name in by_layer(left, root.taken)]

    def finish(self, folder: object) -> None:
        """Raise CheckpointError if there are problems, listing the first of them."""
        problems = self.all_problems()
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise CheckpointError(
                f"{folder} does not fit its config.json: {'; '.join(problems[:SHOWN])}{more}",
                hint=MISFIT,
            )

    def _note(self, problem: str) -> None:
        """Collect a problem. So many of them mean that config.json is of another model: give up."""
        problems = self._root.problems
        problems.append(problem)
        if len(problems) >= ENOUGH:
            self._give_up(f"; and at least {ENOUGH - SHOWN} more")

    def _give_up(self, more: str = "") -> NoReturn:
        raise CheckpointError(
            f"the weights are not those that config.json describes: "
            f"{'; '.join(self._root.problems[:SHOWN])}{more}",
            hint=MISFIT,
        )

    def _refuse_endless(self, name: str, rows: int) -> None:
        """Raise for a matrix that no array could be: MLX counts to 2**31."""
        if rows >= 1 << 31:
            raise CheckpointError(
                f"{self.prefix}{name}: by config.json this matrix has {rows} rows", hint=MISFIT
            )

    def _take(self, name: str, shape: tuple[int, ...] | None) -> mx.array | None:
        """Tensor `name`, None (and a problem noted) if it is missing or has another shape."""
        root = self._root
        tensor = self.source.tensors.get(name)
        if tensor is None:
            if not self._absent:
                self._note(f"{name} is missing")
            root.missed += 1
            if root.missed >= MOST_MISSED:
                self._give_up()
            return None
        root.taken.add(name)
        if shape is not None and tensor.shape != shape:
            self._note(f"{name} has shape {list(tensor.shape)}, must be {list(shape)}")
            return None
        return self.source.read(name)

    def _part(
        self, name: str, n: int, k: int, bias: bool, *, stack: int = 0
    ) -> QuantizedLinear | Linear:
        """Linear `name`, n x k. stack: so many of them, in one tensor of three axes."""
        path = self.prefix + name
        offset = self._take(f"{path}.bias", (n,)) if bias else None
        declared = self.declared.of(path)
        if declared is False:
            self.drop(f"{name}.scales")
            self.drop(f"{name}.biases")
        lead = (stack,) if stack else ()
        count = max(stack, 1)
        if declared is not False and self._scales_lost(name):
            return Linear(mx.zeros((count * n, 1)), offset)
        if declared is False or not self.has(f"{name}.scales"):
            weight = self._take(f"{path}.weight", (*lead, n, k))
            if weight is None:
                return Linear(mx.zeros((count * n, 1)), offset)
            self._root.formats[path] = (count * n * k, weight.dtype)
            self._root.slow.append(f"{path}: not quantized, a plain product runs")
            return Linear(weight.reshape(-1, k), offset)
        matrix = self._matrix(path, lead, n, k, declared)
        if matrix is None:
            return Linear(mx.zeros((count * n, 1)), offset)
        self._root.formats[path] = (count * n * k, matrix.spec)
        return QuantizedLinear(matrix, offset)

    def _scales_lost(self, name: str) -> bool:
        """Whether `name` is packed, but its scales are not there: one problem, not one a part."""
        w = self.source.tensors.get(f"{self.prefix}{name}.weight")
        if w is None or w.dtype != "U32" or self.has(f"{name}.scales"):
            return False
        self.drop(name)
        self._note(f"{self.prefix}{name}.scales is missing")
        return True

    def _packed(self, part: QuantizedLinear | Linear) -> QuantizedLinear | Linear:
        """In the layout of the backend's kernels, under way: what it came from is freed then."""
        if not self._computes:
            return part
        if isinstance(part, Linear):
            mx.async_eval(part.weight, part.bias)
            return part
        matrix = part.matrix.pack()
        mx.async_eval(matrix.w, matrix.scales, matrix.biases, part.bias)
        return QuantizedLinear(matrix, part.bias)

    def _ready(self, array: mx.array) -> mx.array:
        """The same, under way."""
        if self._computes:
            mx.async_eval(array)
        return array

    @property
    def _computes(self) -> bool:
        """Not for a look at headers, and no longer once there is a problem."""
        return self._root.pack and not self._root.problems

    def _expert_part(
        self, stacked: str, listed: str, count: int, n: int, k: int
    ) -> QuantizedLinear | Linear:
        """All experts' rows below each other, (count * n) x k."""
        if self.has(f"switch_mlp.{stacked}.weight"):
            return self._part(f"switch_mlp.{stacked}", n, k, bias=False, stack=count)
        parts = [self._part(f"experts.{e}.{listed}", n, k, bias=False) for e in range(count)]
        whole = self._join(parts, False, (f"experts.*.{listed}",))
        if isinstance(whole, Stacked):
            self._note(
                f"{self.prefix}experts.*.{listed}: experts of several formats are not supported"
            )
            return Linear(mx.zeros((n, 1)))
        return whole

    def _matrix(
        self, path: str, lead: tuple[int, ...], n: int, k: int, declared: Quantization | None
    ) -> QuantizedMatrix | None:
        tensors = self.source.tensors
        w, scales = tensors.get(f"{path}.weight"), tensors[f"{path}.scales"]
        if w is None or w.dtype != "U32":
            self.drop(path.removeprefix(self.prefix))
            kind = "missing" if w is None else f"of type {w.dtype}, must be U32"
            self._note(f"{path}.weight is {kind}")
            return None
        try:
            if w.shape[: len(lead)] != lead or scales.shape[: len(lead)] != lead:
                raise ValueError(f"w {w.shape} and scales {scales.shape} must begin with {lead}")
            float_scales = scales.dtype != "U8"
            own = (w.shape[len(lead) :], scales.shape[len(lead) :])
            spec = infer(k, *own, float_scales=float_scales)
        except ValueError as error:
            self.drop(path.removeprefix(self.prefix))
            self._note(f"{path}: {error}")
            return None
        if declared is not None and declared != spec:
            self._note(f"{path}.weight is {spec} by its shape, but config.json says {declared}")
        groups = (n, k // spec.group_size)
        arrays = [
            self._take(f"{path}.weight", (*lead, n, k * spec.bits // 32)),
            self._take(f"{path}.scales", (*lead, *groups)),
            self._take(f"{path}.biases", (*lead, *groups)) if spec.mode == "affine" else None,
        ]
        if any(a is None for a in arrays[: 3 if spec.mode == "affine" else 2]):
            return None
        weight, scale, offset = (None if a is None else a.reshape(-1, a.shape[-1]) for a in arrays)
        assert weight is not None
        assert scale is not None
        if offset is not None and offset.dtype != scale.dtype:
            types = [str(a.dtype).removeprefix("mlx.core.") for a in (offset, scale)]
            self._note(f"{path}.biases is {types[0]}, but scales are {types[1]}")
            return None
        matrix = QuantizedMatrix.of(weight, scale, offset, spec)
        return replace(matrix, activations=self._root.activations)

    def _join(
        self, parts: list[QuantizedLinear | Linear], interleave: bool, names: tuple[str, ...]
    ) -> AnyLinear:
        whole = join(parts, interleave)
        if isinstance(whole, Stacked):
            path = f"{self.prefix}{{{','.join(names)}}}"
            self._root.slow.append(f"{path}: formats differ, so these run one by one")
        return whole


def by_layer(left: list[str], taken: Iterable[str]) -> Iterator[str]:
    """Sorted names left over. A layer of which nothing was taken is one: the file has more."""

    def layer(name: str) -> str:
        found = re.match(r"(?:.*\.)?layers\.\d+\.", name)
        return found[0] if found else ""

    known = {layer(name) for name in taken} | {""}
    for prefix, group in groupby(left, key=layer):
        names = list(group)
        yield from names if prefix in known or len(names) == 1 else [f"{prefix}*"]
