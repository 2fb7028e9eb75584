"""llama.cpp as a peer. Usage: python llama_cpp_peer.py MODEL.gguf THREADS LAYERS_ON_GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import llama_cpp


def main() -> None:
    path, threads, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = llama_cpp.Llama(
        path,
        n_ctx=4608,
        n_batch=2048,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=layers,
        verbose=False,
    )
    print(json.dumps({"name": f"llama.cpp {Path(path).stem}, {threads} threads"}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        ids = ask["ids"]
        model.reset()
        model._ctx.kv_cache_clear()
        start = time.perf_counter()
        model.eval(ids)
        if ask["what"] == "decode":
            start = time.perf_counter()
            for step in range(ask["steps"]):
                model.eval([ids[step % len(ids)]])
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
