"""What --activations costs: perplexity and greedy agreement with the float32 texts of the tests.

Usage: python scripts/activations.py MODEL TEXT...
MODEL: SmolLM2-135M-Instruct as `qrun convert` makes it from the Q4_1 GGUF. Perplexity is taken of
each TEXT (up to 2048 tokens, fed as prompts of 512) and of the answers, these also token by token.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import mlx.core as mx

import qrun
from qrun.loader import LoadedModel
from qrun.ops.matrix import Activations

FIXTURE = Path(__file__).parents[1] / "tests" / "fixtures" / "smollm2_greedy.json"


def surprise(model: LoadedModel, ids: list[int], step: int) -> list[float]:
    """-log p of ids[1:], fed `step` at a time."""
    cache = model.new_cache(len(ids))
    out: list[float] = []
    for i in range(0, len(ids) - 1, step):
        part = ids[i : i + step]
        logits = model.model.logits(model.model(mx.array(part, mx.int32), cache))
        following = mx.array(ids[i + 1 : i + 1 + step], mx.int32)
        logits = logits[: following.size].astype(mx.float32)
        chosen = mx.take_along_axis(logits, following[:, None], axis=-1)[:, 0]
        out += (mx.logsumexp(logits, axis=-1) - chosen).tolist()
        mx.eval(cache.keys, cache.values)
        cache.advance(len(part))
    return out


def perplexity(nats: list[float]) -> float:
    """Of so many tokens together."""
    return math.exp(sum(nats) / len(nats))


def main() -> None:
    """One line a mode."""
    records = json.loads(FIXTURE.read_text(encoding="utf-8"))["records"]
    for mode in get_args(Activations):
        model = replace(qrun.load(sys.argv[1], activations=mode), eos=frozenset[int]())
        line: list[str] = []
        for path in sys.argv[2:]:
            ids = model.tokenizer.encode(Path(path).read_text(encoding="utf-8"))[:2048]
            line.append(
                f"{Path(path).name} ({len(ids)}) {perplexity(surprise(model, ids, 512)):.3f}"
            )
        for step, name in ((512, "as prompts"), (1, "token by token")):
            nats: list[float] = []
            for r in records:
                nats += surprise(model, r["ids"] + r["tokens"], step)[len(r["ids"]) - 1 :]
            line.append(f"answers {name} ({len(nats)}) {perplexity(nats):.4f}")
        same: list[int] = []
        for r in records:
            tokens = qrun.generate(model, r["prompt"], raw=r["raw"], max_tokens=64).tokens
            pairs = enumerate(zip(tokens, r["tokens"], strict=True))
            same.append(next((i for i, (a, b) in pairs if a != b), 64))
        print(f"{mode}: {', '.join(line)}; of 64 greedy tokens the first {same} agree")


if __name__ == "__main__":
    main()
