"""GGUF or float safetensors -> a quantized safetensors folder that qrun and mlx-lm load.

Tensors are read, quantized and written a few million elements at a time, into a hidden folder
beside the target that takes the target's name only when it is complete.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qrun import gguf_blocks
from qrun.errors import CheckpointError, QrunError, UsageError
from qrun.gguf import is_gguf
from qrun.gguf_models import read_gguf
from qrun.quantization import MODES, Quantization
from qrun.safetensors_writer import Planned, SafetensorsWriter
from qrun.source import FLOATS, Source, SourceTensor, read_folder

Progress = Callable[[str, int, int], None]
Array = npt.NDArray[Any]

CHUNK = 1 << 22  # elements quantized at a time
DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")  # small, and everything follows


@dataclass(frozen=True)
class ConvertReport:
    path: Path
    source: str  # "gguf" or "huggingface"
    model_type: str
    dtype: str
    parameters: int
    bits_per_weight: float
    nbytes: int  # of all tensors written
    shards: int
    kept: int  # matrices whose integers were taken over from the GGUF
    quantized: int  # matrices quantized anew
    dense: int  # tensors left in floating point
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Job:
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
    """MLX's own quantization of rows (R, K), on the CPU whatever the default device is."""
    import mlx.core as mx  # here, because a GGUF that is kept as it is needs no MLX

    with mx.stream(mx.cpu):
        found = mx.quantize(
            mx.array(values), group_size=spec.group_size, bits=spec.bits, mode=spec.mode
        )
        return [np.array(a) for a in found]


def convert(
    src: Path,
    dst: Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str | None = None,
    dtype: str | None = None,
    recipe: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert a GGUF file or a Hugging Face folder into the quantized folder `dst`.

    A GGUF keeps its integers where they are affine ones already; matrices of its other block types
    are quantized anew (4 bits, groups of 32), float ones only if `bits`, `group_size` or `mode` is
    given. A folder is quantized to 4 bits in groups of 64. `dtype` is that of everything dense and
    of the scales; left out, it is the source's 16-bit type, and float16 for a float32 source
    (bfloat16 for gemma, whose activations pass float16's range).
    """
    src, dst = Path(src), Path(os.path.realpath(dst))
    asked = _check_options(bits, group_size, mode, dtype)
    if not src.exists():
        raise UsageError(f"{src}: no such file or folder")
    _check_target(src, dst, force)
    gguf = is_gguf(src)
    if not gguf and not src.is_dir():
        raise CheckpointError(
            f"{src}: neither a GGUF file nor a folder",
            hint="give a .gguf file, or a folder with config.json and model.safetensors",
        )
    source = read_gguf(src) if gguf else read_folder(src)
    jobs = [_plan(t, source, asked, dtype or source.dtype) for t in source.tensors]
    with _new_folder(dst) as folder:
        writer = SafetensorsWriter(folder, [job.outputs() for job in jobs])
        try:
            _write_tensors(src, jobs, writer, progress)
            writer.sync()
        finally:
            writer.close()
        _write_small_files(folder, source, jobs, dtype or source.dtype)
    parameters = sum(t.size for t in source.tensors)
    return ConvertReport(
        path=dst,
        source=source.kind,
        model_type=source.config["model_type"],
        dtype=dtype or source.dtype,
        parameters=parameters,
        bits_per_weight=8 * writer.total / parameters,
        nbytes=writer.total,
        shards=len(writer.files),
        kept=sum(job.keep for job in jobs),
        quantized=sum(job.spec is not None and not job.keep for job in jobs),
        dense=sum(job.spec is None for job in jobs),
        notes=tuple(source.notes),
    )


# ---- decisions


@dataclass(frozen=True)
class _Asked:
    bits: int | None
    group_size: int | None
    mode: str | None

    @property
    def anything(self) -> bool:
        return (self.bits, self.group_size, self.mode) != (None, None, None)

    def allows(self, spec: Quantization) -> bool:
        return (
            self.bits in (None, spec.bits)
            and self.group_size in (None, spec.group_size)
            and self.mode in (None, spec.mode)
        )

    def spec(self, default_group: int) -> Quantization:
        mode = self.mode or "affine"
        group, bits = MODES.get(mode, (0, 0))  # Quantization refuses an unknown mode
        if mode == "affine":
            group = default_group
        return Quantization(
            bits if self.bits is None else self.bits,
            group if self.group_size is None else self.group_size,
            mode,
        )


def _check_options(
    bits: int | None, group_size: int | None, mode: str | None, dtype: str | None
) -> _Asked:
    asked = _Asked(bits, group_size, mode)
    try:
        asked.spec(default_group=64)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", hint=f"one of: {', '.join(DTYPES)}")
    return asked


def _plan(t: SourceTensor, source: Source, asked: _Asked, dtype: str) -> _Job:
    block = t.stored not in FLOATS and source.kind == "gguf"
    target = DTYPES[dtype]
    if not block and t.stored not in FLOATS:
        if t.stored.startswith(("F8", "F64")):
            raise CheckpointError(f"{source.path}: tensor {t.name} has dtype {t.stored}")
        return _Job(t, None, False, t.stored)  # integers, as they are
    matrix = len(t.shape) > 1 and t.name.endswith(".weight") and not t.name.endswith(_ROUTERS)
    if matrix and t.stored in gguf_blocks.AFFINE_BITS:
        kept = Quantization(gguf_blocks.AFFINE_BITS[t.stored], gguf_blocks.GROUP)
        if asked.allows(kept):
            if target == "BF16" and t.stored in gguf_blocks.EXACT_IN_FLOAT16:
                target = "F16"  # bfloat16 would round the scales
            return _Job(t, kept, True, target)
    spec = asked.spec(default_group=gguf_blocks.GROUP if source.kind == "gguf" else 64)
    wanted = block or source.kind == "huggingface" or asked.anything
    if matrix and wanted and t.width % spec.group_size == 0:
        return _Job(t, spec, False, target)
    return _Job(t, None, False, target)


def _quantization(jobs: list[_Job]) -> dict[str, Any] | None:
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


# ---- writing


def _write_tensors(
    src: Path, jobs: list[_Job], writer: SafetensorsWriter, progress: Progress | None
) -> None:
    done = 0
    for job in jobs:
        names = [planned.name for planned in job.outputs()]
        step = max(1, CHUNK // job.tensor.width)
        for first in range(0, job.tensor.row_count, step):
            raw = job.tensor.rows(first, min(first + step, job.tensor.row_count))
            try:
                pieces = job.encode(raw)
            except QrunError as error:
                raise type(error)(f"{src}: {error}", hint=error.hint) from None
            for name, piece in zip(names, pieces, strict=True):
                writer.write(name, piece)
                done += piece.nbytes
            if progress:
                progress("converting", done, writer.total)


def _write_small_files(folder: Path, source: Source, jobs: list[_Job], dtype: str) -> None:
    config = dict(source.config)
    config["dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"] = dtype
    quantization = _quantization(jobs)
    if quantization:
        config |= {"quantization": quantization, "quantization_config": quantization}
    texts = source.texts | {"config.json": json.dumps(config, ensure_ascii=False, indent=2) + "\n"}
    for name, text in texts.items():
        _write_synced(folder / name, text.encode())
    for path in source.copies:
        _write_synced(folder / path.name, path.read_bytes())


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _check_target(src: Path, dst: Path, force: bool) -> None:
    inside = Path(os.path.realpath(src))
    if dst == inside or dst in inside.parents:
        raise UsageError(f"{dst}: the target holds the source")
    if not os.path.lexists(dst):
        return
    if not force:
        raise UsageError(f"{dst}: exists already", hint="give another name, or --force")
    if not dst.is_dir() or (any(dst.iterdir()) and not (dst / "config.json").is_file()):
        raise UsageError(f"{dst}: not a model's folder, so --force does not replace it")


@contextmanager
def _new_folder(dst: Path) -> Generator[Path]:
    """A hidden folder beside `dst` that becomes `dst` if the block ends well, and goes if not."""
    folder = None
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{dst.name}.", dir=dst.parent))
        yield folder
        folder.chmod(0o777 & ~_umask())
        _sync_folder(folder)
        _put_in_place(folder, dst)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise QrunError(
            f"{dst}: cannot be written: {error.strerror or error}",
            hint="free some space, or choose another disk" if full else None,
        ) from None
    finally:
        if folder is not None and folder.exists():
            shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, dst: Path) -> None:
    """Rename the complete folder to `dst`; what was there goes only after that."""
    old = None
    if os.path.lexists(dst):
        old = Path(tempfile.mkdtemp(prefix=f".{dst.name}.old.", dir=dst.parent))
        os.rename(dst, old)
    try:
        os.rename(folder, dst)
    except BaseException:
        if old:
            os.rename(old, dst)
        raise
    _sync_folder(dst.parent)
    if old:
        shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
