"""llama.cpp as a peer of `qrun bench`, in its own environment: pip install llama-cpp-python.

Usage: python llama_cpp_peer.py MODEL.gguf THREADS. Speaks the protocol of scripts/peers/README.md.
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    model = llama_cpp.Llama(
        path,
        n_ctx=4608,
        n_batch=2048,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    print(
        json.dumps({"name": f"llama.cpp {llama_cpp.__version__}", "threads": threads}), flush=True
    )
    for line in sys.stdin:
        ask = json.loads(line)
        model.reset()
        model._ctx.kv_cache_clear()
        ids = [(7 * i + 11) % 40000 + 100 for i in range(ask["context"])]
        start = time.perf_counter()
        model.eval(ids)
        if ask["what"] == "decode":
            start = time.perf_counter()
            for step in range(ask["steps"]):
                model.eval([1000 + step])
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
