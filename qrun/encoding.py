"""How each tensor is encoded: kept, quantized anew or dense, and the bytes that come of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qrun import gguf_blocks
from qrun.errors import CheckpointError, UsageError
from qrun.quantization import AFFINE_GROUPS, MODES, Quantization
from qrun.safetensors_writer import Planned
from qrun.source import FLOATS, Source, SourceTensor

Array = npt.NDArray[Any]

DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
# bits of most matrices, and of those that a model misses most
RECIPES = {"mixed_3_6": (3, 6), "mixed_4_6": (4, 6), "mixed_4_8": (4, 8)}
_ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")  # small, and everything follows


@dataclass(frozen=True)
class Wishes:
    """What was asked for; None leaves it to the source. Raises UsageError if it cannot be had."""

    bits: int | None = None
    group_size: int | None = None
    mode: str | None = None
    dtype: str | None = None
    recipe: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"unknown dtype {self.dtype!r}", hint=f"one of: {', '.join(DTYPES)}")
        if self.recipe is not None and self.recipe not in RECIPES:
            raise UsageError(
                f"unknown recipe {self.recipe!r}", hint=f"one of: {', '.join(RECIPES)}"
            )
        if self.recipe and (self.bits is not None or self.mode not in (None, "affine")):
            raise UsageError("a recipe sets the bits itself, in affine mode")
        try:
            self.spec(self.bits, default_group=64)
        except ValueError as error:
            raise UsageError(str(error)) from None

    @property
    def anything(self) -> bool:
        return (self.bits, self.group_size, self.mode, self.recipe) != (None, None, None, None)

    def bits_of(self, name: str, layers: int) -> int | None:
        """Bits asked for a matrix of a model with so many layers."""
        if self.recipe is None:
            return self.bits
        low, high = RECIPES[self.recipe]
        return high if _is_sensitive(name, layers) else low

    def allows(self, spec: Quantization, bits: int | None) -> bool:
        return (
            bits in (None, spec.bits)
            and self.group_size in (None, spec.group_size)
            and self.mode in (None, spec.mode)
        )

    def spec(self, bits: int | None, default_group: int) -> Quantization:
        mode = self.mode or "affine"
        group, default_bits = MODES.get(mode, (0, 0))  # Quantization refuses an unknown mode
        if mode == "affine":
            group = default_group
        return Quantization(
            default_bits if bits is None else bits,
            group if self.group_size is None else self.group_size,
            mode,
        )


def _is_sensitive(name: str, layers: int) -> bool:
    """Embedding and head; down_proj and v_proj in the first and the last eighth of the layers."""
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return True
    found = re.search(r"\blayers\.(\d+)\..*\b(down_proj|v_proj)\.weight$", name)
    if not found:
        return False
    eighth = max(1, layers // 8)
    return not eighth <= int(found[1]) < layers - eighth


@dataclass(frozen=True)
class Job:
    """One tensor on its way: what is read, how it is encoded, what is written."""

    tensor: SourceTensor
    spec: Quantization | None  # None: dense
    keep: bool  # take the GGUF's integers as they are
    dtype: str  # of the dense values, or of scales and biases, by safetensors name

    def outputs(self) -> list[Planned]:
        name, shape = self.tensor.name, self.tensor.shape
        if self.spec is None:
            return [Planned(name, self.dtype, shape)]
        module = name.removesuffix(".weight")
        packed = (*shape[:-1], shape[-1] * self.spec.bits // 32)
        grouped = (*shape[:-1], shape[-1] // self.spec.group_size)
        if self.spec.mode != "affine":
            return [Planned(name, "U32", packed), Planned(f"{module}.scales", "U8", grouped)]
        return [
            Planned(name, "U32", packed),
            Planned(f"{module}.scales", self.dtype, grouped),
            Planned(f"{module}.biases", self.dtype, grouped),
        ]

    def encode(self, raw: npt.NDArray[np.uint8]) -> list[Array]:
        """Some raw rows of the tensor as the same rows of each output."""
        t = self.tensor
        if self.spec is None and t.stored == self.dtype and t.stored not in FLOATS:
            return [raw]
        if self.keep and self.spec:
            codes, scales, biases = gguf_blocks.affine(t.stored, raw)
            packed = gguf_blocks.pack(codes, self.spec.bits)
            return [packed, self.cast(scales), self.cast(biases)]
        values = gguf_blocks.dequantize(t.stored, raw)
        if t.add:
            values = values + np.float32(t.add)
        if self.spec is None:
            return [self.cast(values)]
        if not np.isfinite(values).all():
            raise CheckpointError(f"tensor {t.name} holds NaN or infinity")
        w, *grouped = _quantize(values, self.spec)
        return [w, *(g if self.spec.mode != "affine" else self.cast(g) for g in grouped)]

    def cast(self, values: npt.NDArray[np.float32]) -> Array:
        """Float32 values in the job's dtype (bfloat16 as its bits), or a refusal by name."""
        if not np.isfinite(values).all():
            raise CheckpointError(f"tensor {self.tensor.name} holds NaN or infinity")
        if self.dtype == "BF16":
            bits = np.ascontiguousarray(values).view(np.uint32)
            narrow = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
            finite = (narrow & 0x7F80) != 0x7F80
        else:
            with np.errstate(over="ignore"):
                narrow = values.astype("<f2" if self.dtype == "F16" else "<f4")
            finite = np.isfinite(narrow)
        if not finite.all():
            raise CheckpointError(
                f"tensor {self.tensor.name} holds values beyond the largest {self.dtype}",
                hint="convert with --dtype float32",
            )
        return narrow


def _quantize(values: npt.NDArray[np.float32], spec: Quantization) -> list[Array]:
    """MLX's quantization of rows (R, K), on the CPU whatever the default device is."""
    if spec.mode in ("mxfp4", "nvfp4"):
        from qrun.microscaling import quantize_fp4

        return list(quantize_fp4(values, spec.mode))
    import mlx.core as mx  # here, because a GGUF that is kept as it is needs no MLX

    found = mx.quantize(
        mx.array(values),
        group_size=spec.group_size,
        bits=spec.bits,
        mode=spec.mode,
        stream=mx.cpu,
    )
    return [np.array(a) for a in found]


def plan(source: Source, wishes: Wishes) -> list[Job]:
    """A job for each tensor, in the source's order."""
    numbers = [re.search(r"\blayers\.(\d+)\.", t.name) for t in source.tensors]
    layers = max((int(n[1]) + 1 for n in numbers if n), default=0)
    return [_plan(t, source, wishes, layers) for t in source.tensors]


def _plan(t: SourceTensor, source: Source, wishes: Wishes, layers: int) -> Job:
    block = t.stored not in FLOATS and source.kind == "gguf"
    target = DTYPES[wishes.dtype or source.dtype]
    bits = wishes.bits_of(t.name, layers)
    if not block and t.stored not in FLOATS:
        if t.stored.startswith(("F8", "F64")):
            raise CheckpointError(f"{source.path}: tensor {t.name} has dtype {t.stored}")
        return Job(t, None, False, t.stored)  # integers, as they are
    matrix = len(t.shape) > 1 and t.name.endswith(".weight") and not t.name.endswith(_ROUTERS)
    if matrix and t.stored in gguf_blocks.AFFINE_BITS:
        kept = Quantization(gguf_blocks.AFFINE_BITS[t.stored], gguf_blocks.GROUP)
        if wishes.allows(kept, bits):
            # bfloat16 would round scales that float16 holds exactly
            return Job(t, kept, True, "F16" if target == "BF16" else target)
    if block:
        gguf_blocks.require_reader(t.stored)
    if bits is None and wishes.mode in (None, "affine"):
        bits = gguf_blocks.AFFINE_BITS.get(t.stored)  # another group size costs no bits
    wish = wishes.spec(bits, default_group=gguf_blocks.GROUP if source.kind == "gguf" else 64)
    wanted = block or source.kind == "huggingface" or wishes.anything
    spec = _fitting(wish, t.width) if matrix and wanted else None
    return Job(t, spec, False, target)


def _fitting(wish: Quantization, width: int) -> Quantization | None:
    """The wish, or in affine mode the same with the largest smaller group that divides a width."""
    groups = [g for g in reversed(AFFINE_GROUPS) if g < wish.group_size and wish.mode == "affine"]
    fits = (g for g in (wish.group_size, *groups) if width % g == 0)
    group = next(fits, None)
    return None if group is None else replace(wish, group_size=group)


def stored_bits(tensor: SourceTensor) -> int:
    """Bits a weight of a GGUF's block type, by its name; 0 of a float, of which none is kept."""
    found = None if tensor.stored in FLOATS else re.search(r"\d", tensor.stored)
    return int(found[0]) if found else 0


def quantization_entries(jobs: Sequence[Job]) -> dict[str, Any] | None:
    """The commonest spec by elements, and an entry for each module that differs from it."""
    sizes = Counter[Quantization]()
    for job in jobs:
        if job.spec:
            sizes[job.spec] += job.tensor.size
    if not sizes:
        return None
    common = sizes.most_common(1)[0][0]
    return _entry(common) | {
        job.tensor.name.removesuffix(".weight"): _entry(job.spec)
        for job in jobs
        if job.spec and job.spec != common
    }


def _entry(spec: Quantization) -> dict[str, Any]:
    return {"group_size": spec.group_size, "bits": spec.bits, "mode": spec.mode}
