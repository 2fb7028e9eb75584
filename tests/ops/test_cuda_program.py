"""Recording a step for a CUDA graph: what is launched, and where its results lie. No GPU needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from qrun.generation import forward
from qrun.loader import load
from qrun.ops import _cuda, _cuda_product, _launch
from qrun.ops._cuda_program import Block, NotRecordableError, Slot, Tape, record
from tests import zoo


def tape_of(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> Tape | None:
    monkeypatch.setattr(_launch, "backend", lambda: _cuda)
    monkeypatch.setattr(_cuda_product, "generation", lambda: 9)
    model = load(folder, dtype="bfloat16")
    cache = model.new_cache(64)
    return record(
        forward(model, cache, _cuda_argmax), [mx.zeros(rows, mx.int32), cache.offset], cache.state
    )


def _cuda_argmax(logits: mx.array) -> mx.array:
    return _cuda.argmax(logits, logits.shape[1])


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "phi3_long", "smollm3"])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_step_is_launches_of_ours_only(
    case: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = tape_of(zoo.write(tmp_path / case, case, bits=4), monkeypatch, rows)
    assert tape is not None
    assert [slot.shape for slot in tape.outputs] == [(1,)]
    layers = int(zoo.config_of(case)["num_hidden_layers"])
    outside = 4  # embedding, the head, two of argmax
    if rows == 1:
        assert len(tape.launches) == outside + 5 * layers


@pytest.mark.parametrize(
    "case", ["mixtral", "qwen3_moe", "gemma2", "gemma3_text", "olmo2", "granite", "cohere2"]
)
def test_a_step_of_other_architectures_is_recorded(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tape_of(zoo.write(tmp_path / case, case, bits=4), monkeypatch, 1) is not None


def test_blocks_in_use_at_once_do_not_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = tape_of(zoo.write(tmp_path / "llama", "llama", bits=4), monkeypatch, 40)
    assert tape is not None
    places, size = tape.placed()
    kept = {slot.block for slot in (*tape.inputs, *tape.outputs)}
    uses: dict[Block, list[int]] = {block: [0, len(tape.launches)] for block in kept}
    for n, each in enumerate(tape.launches):
        for a in each.arrays:
            if isinstance(a, Slot) and a.block not in kept:
                uses.setdefault(a.block, []).append(n)
    assert len(uses) > 20
    for a, when in uses.items():
        assert places[a] >= 0 and places[a] + a.size <= size
        for b, other in uses.items():
            if a is not b and min(when) <= max(other) and min(other) <= max(when):
                apart = places[a] + a.size <= places[b]
                assert apart or places[b] + b.size <= places[a]
    assert size < sum(block.size for block in uses) / 2  # and what is free is used again


def test_an_op_of_mlx_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = zoo.write(tmp_path / "llama", "llama")  # its embedding is a look-up by MLX
    assert tape_of(dense, monkeypatch, 1) is None
    slot = Slot((2, 8), mx.float32, Block(64))
    with pytest.raises(NotRecordableError):
        slot.astype(mx.float16)
    with pytest.raises((TypeError, ValueError)):
        mx.add(cast(Any, slot), 1)
    row = slot[1:]
    assert (row.shape, row.start, row.nbytes) == ((1, 8), 32, 32)
    with pytest.raises(NotRecordableError):
        slot[::2]
