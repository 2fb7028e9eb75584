"""Record what mlx-lm computes for the tiny models of tests/zoo.py, as tests/fixtures/mlx_lm/*.json.

Run it in an environment that has mlx-lm, numpy and tokenizers, but not qrun:
    python -m venv peer && peer/bin/pip install mlx-lm "mlx[cpu]"
    PYTHONPATH=. peer/bin/python scripts/record_fixtures.py

A fixture has no weights, both sides make them from a seed. It has the last logits of a prefill and
of the steps behind it (every sixth), and a number for each position: logits times a random vector.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests import zoo

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "mlx_lm"
PREFILL, STEPS = 300, 6


def record(case: str) -> dict[str, Any]:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    with tempfile.TemporaryDirectory() as folder:
        model, _ = load_model(zoo.write(Path(folder) / case, case))
        cache = make_prompt_cache(model)
        ids = mx.array(zoo.ids_of(case, PREFILL + STEPS))[None]
        parts = [model(ids[:, :PREFILL], cache=cache)]
        parts += [model(ids[:, i : i + 1], cache=cache) for i in range(PREFILL, PREFILL + STEPS)]
        logits = np.array(mx.concatenate(parts, axis=1)[0].astype(mx.float32), np.float64)
    assert np.isfinite(logits).all()

    def short(values: Any) -> list[float]:
        return [float(f"{v:.7g}") for v in values]

    return {
        "made_by": f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}",
        "prefill": PREFILL,
        "steps": STEPS,
        "largest": short([np.abs(logits).max()])[0],
        "prefill_logits": short(logits[PREFILL - 1][::6]),
        "step_logits": short(logits[-1][::6]),
        "probe": short(logits @ zoo.probe()),
    }


def main() -> None:
    mx.set_default_device(mx.cpu)
    OUT.mkdir(parents=True, exist_ok=True)
    for case in sys.argv[1:] or zoo.PEERS:
        fixture = record(case)
        (OUT / f"{case}.json").write_text(json.dumps(fixture) + "\n", encoding="utf-8")
        print(f"{case:18} largest logit {fixture['largest']:.3f}")


if __name__ == "__main__":
    main()
