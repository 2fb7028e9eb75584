"""Runs every architecture on MLX's default device against float64 in numpy; prints one table.

python scripts/check_models_cuda.py [CASE ...]     names of tests/zoo.py; by default all of CASES

Each is a tiny random checkpoint of 4 bits, its truth the formulas of tests/reference.py over
the same values: a prefill of 300 tokens, then steps as generation takes them. Exit code 1 if any
number is over its bound.

float32: the largest difference over the largest logit, at most 1e-4; sums of a few hundred terms
lose a hundredth of it.

bfloat16: root mean squares over all logits. Rounding each of some ten results a layer to 8 bits
costs 0.02 (llama). In a mixture one token in fifty goes to another expert, where its router nearly
had two equal: on the CPU 4 of 300 in qwen3_moe, those with the smallest gaps between the last
expert taken and the first one not. Their logits are others altogether (0.64 of a logit's own size),
all the rest stay at 0.013, and the 4 alone make 0.075 of all. How many flip is chance. So the bound
is twice what the same model has in bfloat16 out of MLX's own ops on the same device, or 0.05.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qrun.generation import decode_step
from qrun.loader import load
from qrun.ops import _launch, _mlx
from qrun.quantization import Quantization
from tests import reference, zoo

Array = npt.NDArray[np.float64]
CASES = (
    "llama", "llama_llama3", "mistral_window", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2",
    "gemma3_text", "phi3_long", "smollm3", "granite", "olmo2", "cohere2",
)  # fmt: skip
FORMATS = [(4, 32, "affine"), (4, 32, "mxfp4"), (8, 32, "mxfp8")]
PREFILL, STEPS = 300, 12
ALLOWED = {"float32": 1e-4, "bfloat16": 0.05}


def logits(folder: Path, ids: list[int], dtype: str) -> Array:
    """(L, V): a prefill of PREFILL ids, then one at a time."""
    model = load(folder, dtype=dtype)
    cache = model.new_cache(len(ids))
    hidden = model.model(mx.array(ids[:PREFILL], mx.int32), cache)
    found = [model.model.logits(hidden)]
    cache.advance(PREFILL)
    mx.eval(found[0], cache.keys, cache.values)
    step = decode_step(model, cache)
    for token in ids[PREFILL:]:
        found.append(step(mx.array([token], mx.int32)))
        mx.eval(found[-1])
    return np.array(mx.concatenate(found).astype(mx.float32), np.float64)


@contextmanager
def plain_ops() -> Generator[None]:
    """Within: MLX's own ops only."""
    ours = _launch._backend  # pyright: ignore[reportPrivateUsage]
    _launch._backend = lambda device: _mlx  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        _launch._backend = ours  # pyright: ignore[reportPrivateUsage]


def check(case: str, dtype: str, spec: Quantization) -> tuple[float, float]:
    """The difference from the formulas, as told above, and what is allowed."""
    stored = {"float32": "F16", "bfloat16": "BF16"}[dtype]
    ids = zoo.ids_of(case, PREFILL + STEPS)
    form: dict[str, Any] = {
        "bits": spec.bits, "group_size": spec.group_size, "mode": spec.mode, "dtype": stored,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = zoo.write(Path(name) / case, case, **form)
        got = logits(folder, ids, dtype)
        with plain_ops():
            plain = logits(folder, ids, dtype)
    tensors = reference.unpacked(zoo.tensors(case, **form), spec)
    want = reference.logits_of(zoo.config_of(case), tensors, ids, len(ids))
    allowed = ALLOWED[dtype]
    if dtype == "float32":
        return float(np.abs(got - want).max() / np.abs(want).max()), allowed
    ours, its = (float(np.sqrt(np.square(y - want).mean())) for y in (got, plain))
    size = float(np.sqrt(np.square(want).mean()))
    return ours / size, max(allowed, 2 * its / size)


def main() -> None:
    device = mx.default_device()
    print(f"backend {_launch.backend().NAME} on {device}, prefill {PREFILL}, {STEPS} steps")
    print(f"{'difference from float64 (allowed)':36}" + "".join(f"{d:>21}" for d in ALLOWED))
    failed = 0
    rows = [(case, FORMATS[0]) for case in sys.argv[1:] or CASES]
    rows += [(case, form) for form in FORMATS[1:] for case in ("llama_wide", "qwen3_moe")]
    for case, form in rows:
        spec = Quantization(*form)
        cells: list[str] = []
        for dtype in ALLOWED:
            try:
                worst, allowed = check(case, dtype, spec)
            except Exception as error:
                if not failed:
                    traceback.print_exc()
                print(f"{case} {dtype}: {type(error).__name__}: {error}")
                worst = allowed = float("nan")
            good = worst <= allowed  # not so for NaN
            failed += not good
            cells.append(f"{worst:10.1e} ({allowed:.1e}){'' if good else '!'}")
        print(f"{case:16}{spec!s:20}" + "".join(f"{cell:>21}" for cell in cells), flush=True)
    print(f"{failed} over the bound" if failed else "all within the bound")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
