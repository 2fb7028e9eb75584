"""Runs every architecture on MLX's default device against float64 in numpy; prints one table.

python scripts/check_models_cuda.py [CASE ...]     names of tests/zoo.py; by default all of CASES

Each is a tiny random checkpoint of 4 bits, its truth the formulas of tests/reference.py over
the same values: a prefill of 300 tokens, then steps as generation takes them. Exit code 1 if any
number is over its bound.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qrun.generation import decode_step
from qrun.loader import load
from qrun.ops import _launch
from qrun.quantization import Quantization
from tests import reference, zoo

Array = npt.NDArray[np.float64]
CASES = (
    "llama", "llama_llama3", "mistral_window", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2",
    "gemma3_text", "phi3_long", "smollm3", "granite", "olmo2", "cohere2",
)  # fmt: skip
FORMATS = [(4, 32, "affine"), (4, 32, "mxfp4"), (8, 32, "mxfp8")]
PREFILL, STEPS = 300, 12
# float32: the largest difference over the largest logit; a hundredth of the bound is what sums of a
# few hundred terms lose. bfloat16: root mean squares, because one of a mixture's experts may change
# where two are nearly equal; 8 bits are kept of each of some ten results a layer.
ALLOWED = {"float32": 1e-4, "bfloat16": 0.1}


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


def check(case: str, dtype: str, spec: Quantization) -> float:
    """The difference from the formulas, as ALLOWED measures it."""
    stored = {"float32": "F16", "bfloat16": "BF16"}[dtype]
    ids = zoo.ids_of(case, PREFILL + STEPS)
    form: dict[str, Any] = {
        "bits": spec.bits, "group_size": spec.group_size, "mode": spec.mode, "dtype": stored,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        got = logits(zoo.write(Path(name) / case, case, **form), ids, dtype)
    tensors = reference.unpacked(zoo.tensors(case, **form), spec)
    want = reference.logits_of(zoo.config_of(case), tensors, ids, len(ids))
    if dtype == "float32":
        return float(np.abs(got - want).max() / np.abs(want).max())
    return float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))


def main() -> None:
    device = mx.default_device()
    print(f"backend {_launch.backend().NAME} on {device}, prefill {PREFILL}, {STEPS} steps")
    print(f"{'difference from float64':36}" + "".join(f"{d:>12}" for d in ALLOWED))
    failed = 0
    rows = [(case, FORMATS[0]) for case in sys.argv[1:] or CASES]
    rows += [(case, form) for form in FORMATS[1:] for case in ("llama_wide", "qwen3_moe")]
    for case, form in rows:
        spec = Quantization(*form)
        cells: list[str] = []
        for dtype, allowed in ALLOWED.items():
            try:
                worst = check(case, dtype, spec)
            except Exception as error:
                if not failed:
                    traceback.print_exc()
                print(f"{case} {dtype}: {type(error).__name__}: {error}")
                worst = float("nan")
            good = worst <= allowed  # not so for NaN
            failed += not good
            cells.append(f"{worst:10.1e}{' ' if good else '!'} ")
        print(f"{case:16}{spec!s:20}" + "".join(cells), flush=True)
    print(f"{failed} over the bound" if failed else "all within the bound")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
