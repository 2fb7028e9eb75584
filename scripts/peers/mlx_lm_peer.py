"""mlx-lm as a peer of `qrun bench`, in its own environment: pip install mlx-lm "mlx[cpu]".

Usage: python mlx_lm_peer.py FOLDER DTYPE. Speaks the protocol of scripts/peers/README.md.
"""

from __future__ import annotations

import json
import sys
import time

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache


def main() -> None:
    folder, dtype = sys.argv[1], getattr(mx, sys.argv[2])
    model, _ = mlx_lm.load(folder)
    floats = (mx.float32, mx.float16, mx.bfloat16)
    model.update(
        tree_map(lambda a: a.astype(dtype) if a.dtype in floats else a, model.parameters())
    )
    mx.eval(model.parameters())
    print(json.dumps({"name": f"mlx-lm {mlx_lm.__version__} {sys.argv[2]}"}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        cache = make_prompt_cache(model)
        ids = mx.array([[(7 * i + 11) % 40000 + 100 for i in range(ask["context"])]])
        start = time.perf_counter()
        mx.eval(model(ids, cache=cache)[:, -1])
        if ask["what"] == "decode":
            start = time.perf_counter()
            for step in range(ask["steps"]):
                mx.eval(model(mx.array([[1000 + step]]), cache=cache))
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
