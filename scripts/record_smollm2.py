"""Record the greedy text that mlx-lm generates with the converted SmolLM2: tests/test_smollm2.py.

Run in a virtual environment of its own that has mlx-lm (tests need only the file it writes):

    python scripts/record_smollm2.py FOLDER    # as `qrun convert` made it
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.generate import generate_step

TARGET = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "smollm2_greedy.json"
TOKENS = 64
# (prompt, raw): raw prompts go without the chat template.
PROMPTS = [
    ("Why is the sky blue?", False),
    ("Write a haiku about the sea.", False),
    ("Translate to French: Where is the train station?", False),
    ("List three prime numbers above 100 and say why each is prime.", False),
    ("Erkläre in einem Satz, was ein Vulkan ist. 🌋", False),
    ("def fibonacci(n):\n    ", True),
    ("Once upon a time there was a lighthouse keeper who", True),
    ("1, 1, 2, 3, 5, 8,", True),
]


def main() -> None:
    """Write TARGET."""
    mx.set_default_device(mx.cpu)
    model, tokenizer = load(sys.argv[1])
    # Scales, norms and with them activations in float32: sums in 16 bits would hide every error.
    wide = tree_map(
        lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a,
        model.parameters(),
    )
    model.update(wide)
    records = []
    for prompt, raw in PROMPTS:
        if raw:
            ids = tokenizer.encode(prompt)
        else:
            messages = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        steps = generate_step(mx.array(ids), model, max_tokens=TOKENS)  # does not stop at EOS
        tokens = [int(token) for token, _ in steps]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        records.append({"prompt": prompt, "raw": raw, "ids": ids, "tokens": tokens, "text": text})
        print(repr(text[:70]), file=sys.stderr)
    made = {name: version(name) for name in ("mlx-lm", "mlx")}
    TARGET.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(r, ensure_ascii=False) for r in records)
    head = json.dumps(made)
    TARGET.write_text(f'{{"made_by": {head}, "records": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
