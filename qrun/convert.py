"""GGUF or float safetensors -> a quantized safetensors folder that qrun and mlx-lm load.

Tensors are read, quantized and written a few million elements at a time, into a hidden folder
beside the target that takes the target's name only when it is complete.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qrun.config import AGAIN
from qrun.encoding import DTYPES, Job, Wishes, plan, quantization_entries, stored_bits
from qrun.errors import CheckpointError, ModelNotFoundError, QrunError
from qrun.gguf import is_gguf
from qrun.gguf_blocks import AFFINE_BITS
from qrun.gguf_models import read_gguf
from qrun.placing import check_target, clear_leftovers, new_folder
from qrun.safetensors_writer import SafetensorsWriter
from qrun.source import Source, read_folder

Progress = Callable[[str, int, int], None]

CHUNK = 1 << 22  # elements encoded at a time


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
    formats: dict[str, int]  # parameters by what they are stored as
    notes: tuple[str, ...]


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
    are quantized anew (4 bits, groups of 32), float ones only if `bits`, `group_size`, `mode` or
    `recipe` is given. A folder is quantized to 4 bits in groups of 64. Another `group_size` alone
    leaves affine integers their number of bits. Where it does not divide a matrix, the largest
    smaller one does. A recipe gives more bits to embedding and head, and to down_proj and v_proj in
    the first and last eighth of the layers.

    `dtype` is that of everything dense and of the scales (those kept from a GGUF stay float16
    where bfloat16 would round them). Left out, it is the source's 16-bit type, and float16 for a
    float32 source, or bfloat16 for gemma, whose activations pass float16's range.
    """
    src, dst = Path(src), Path(os.path.realpath(dst))
    wishes = Wishes(bits, group_size, mode, dtype, recipe)
    if not src.exists():
        raise ModelNotFoundError(f"{src}: no such file or folder")
    clear_leftovers(dst)
    check_target(src, dst, force)
    gguf = is_gguf(src)
    if not gguf and not src.is_dir():
        raise CheckpointError(
            f"{src}: neither a GGUF file nor a folder",
            hint="give a .gguf file, or a folder with config.json and model.safetensors",
        )
    source = read_gguf(src) if gguf else read_folder(src)
    if not source.tensors:
        raise CheckpointError(f"{src}: holds no tensors", hint=AGAIN)
    jobs = plan(source, wishes)
    with new_folder(src, dst, force) as folder:
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
        formats=_formats(jobs),
        notes=(*source.notes, *_notes(jobs, wishes)),
    )


def _formats(jobs: Sequence[Job]) -> dict[str, int]:
    names = {stored: dtype for dtype, stored in DTYPES.items()}
    sizes = Counter[str]()
    for job in jobs:
        sizes[str(job.spec or names.get(job.dtype, job.dtype))] += job.tensor.size
    return dict(sizes.most_common())


# ---- writing


def _write_tensors(
    src: Path, jobs: list[Job], writer: SafetensorsWriter, progress: Progress | None
) -> None:
    done = 0
    for job in jobs:
        names = [planned.name for planned in job.outputs()]
        step = max(1, CHUNK // job.tensor.width)
        for first in range(0, job.tensor.row_count, step):
            raw = job.tensor.rows(first, min(first + step, job.tensor.row_count))
            try:
                with np.errstate(all="ignore"):  # what is not finite is refused by name
                    pieces = job.encode(raw)
            except QrunError as error:
                raise type(error)(f"{src}: {error}", hint=error.hint) from None
            for name, piece in zip(names, pieces, strict=True):
                writer.write(name, piece)
                done += piece.nbytes
            if progress:
                progress("converting", done, writer.total)


def _write_small_files(folder: Path, source: Source, jobs: list[Job], dtype: str) -> None:
    config = dict(source.config)
    config["dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"] = dtype
    quantization = quantization_entries(jobs)
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


def _notes(jobs: Sequence[Job], wishes: Wishes) -> list[str]:
    """What came out otherwise than was asked, or than one would think."""
    notes: list[str] = []
    matrices = [job for job in jobs if len(job.tensor.shape) > 1]
    anew = [job for job in matrices if job.spec and not job.keep and job.spec.bits <= 4]
    twice = [job for job in anew if AFFINE_BITS.get(job.tensor.stored) == 4]
    if twice:
        notes.append(
            f"{len(twice)} matrices of {twice[0].tensor.stored} are rounded a second time, to "
            f"{twice[0].spec}, which ruins small models: affine 4-bit, group 32, the default, "
            "keeps them"
        )
    group = wishes.group_size
    asked = [j.tensor for j in matrices if group is not None and j.tensor.width % group]
    left = [job.tensor for job in matrices if job.spec is None and job.tensor in asked]
    smaller = [job.tensor for job in matrices if job.spec is not None and job.tensor in asked]
    for tensors, what in ((smaller, "have smaller groups"), (left, "stay dense")):
        if tensors:
            notes.append(
                f"{len(tensors)} matrices {what}: {group} does not divide "
                f"{tensors[0].width}, the width of {tensors[0].name}"
            )
    if (wishes.bits, wishes.mode, wishes.recipe) == (None, None, None):
        lossy = [job for job in matrices if job.spec and job.spec.bits < stored_bits(job.tensor)]
        for kind in sorted({job.tensor.stored for job in lossy}):
            some = [job for job in lossy if job.tensor.stored == kind]
            notes.append(
                f"{len(some)} matrices of {kind} have become {some[0].spec}: --bits or --recipe "
                "keeps more"
            )
    return notes
