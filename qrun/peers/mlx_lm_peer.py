"""mlx-lm as a peer. Usage: python mlx_lm_peer.py FOLDER DTYPE."""

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
    print(json.dumps({"name": f"mlx-lm {sys.argv[2]}"}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        cache = make_prompt_cache(model)
        start = time.perf_counter()
        if ask["ids"][:-1]:  # as in its own loop: logits for the last id only
            model(mx.array([ask["ids"][:-1]]), cache=cache)
            mx.eval([c.state for c in cache])
        token = model(mx.array([ask["ids"][-1:]]), cache=cache)[:, -1].argmax(-1)
        mx.eval(token)
        if ask["what"] == "decode":
            start = time.perf_counter()
            for _ in range(ask["steps"]):  # and the next step is enqueued first
                following = model(token[None], cache=cache)[:, -1].argmax(-1)
                mx.async_eval(following)
                token.item()
                token = following
            token.item()
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
