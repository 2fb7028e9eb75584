"""Every architecture against mlx-lm's recorded numbers, and against numpy in float64."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from qrun.generation import decode_step
from qrun.loader import LoadedModel, load
from qrun.quantization import Quantization
from tests import reference, zoo

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "mlx_lm"
# Of the largest logit. float32 sums of a few hundred terms through a few layers: a hundredth of it.
TOLERANCE = 1e-4


def run(
    model: LoadedModel, ids: list[int], prefill: int, chunk: int = 512
) -> npt.NDArray[np.float64]:
    """Logits (L, V) of every position: a chunked prefill, then steps as generation takes them."""
    state = model.new_cache(len(ids))
    found: list[mx.array] = []
    for start in range(0, prefill, chunk):
        part = mx.array(ids[start : min(start + chunk, prefill)], mx.int32)
        found.append(model.model.logits(model.model(part, state)))
        state.advance(part.size)
    step = decode_step(model, state)
    found += [step(mx.array([token], mx.int32)) for token in ids[prefill:]]
    return np.array(mx.concatenate(found).astype(mx.float32), np.float64)


@cache
def expected(case: str, length: int) -> npt.NDArray[np.float64]:
    tensors = reference.unpacked(zoo.tensors(case), None)
    return reference.logits_of(zoo.config_of(case), tensors, zoo.ids_of(case, length), length)


@pytest.mark.parametrize("case", zoo.PEERS)
def test_equals_mlx_lm(case: str, tmp_path: Path) -> None:
    """Logits of a 300-token prefill and of the steps behind it."""
    fixture: dict[str, Any] = json.loads((FIXTURES / f"{case}.json").read_text())
    prefill = fixture["prefill"]
    model = load(zoo.write(tmp_path / case, case), dtype="float32")
    got = run(model, zoo.ids_of(case, prefill + fixture["steps"]), prefill)
    close = TOLERANCE * fixture["largest"]
    np.testing.assert_allclose(got[prefill - 1][::6], fixture["prefill_logits"], rtol=0, atol=close)
    np.testing.assert_allclose(got[-1][::6], fixture["step_logits"], rtol=0, atol=close)
    np.testing.assert_allclose(got @ zoo.probe(), fixture["probe"], rtol=0, atol=close)


@pytest.mark.parametrize("case", zoo.CASES)
def test_equals_the_formulas(case: str, tmp_path: Path) -> None:
    """The same against float64, with a prefill in chunks: also where mlx-lm cannot be the judge."""
    model = load(zoo.write(tmp_path / case, case), dtype="float32")
    got = run(model, zoo.ids_of(case, 150), 146, chunk=64)
    want = expected(case, 150)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize("case", ["llama_rope_parameters", "phi3_short", "phi3_window",
    "gemma3_rope_parameters", "llama_dynamic_long", "mistral_window", "gemma2_window",
    "qwen2_window", "gemma2_scale", "smollm3_list"])  # fmt: skip
def test_quirks_matter(case: str) -> None:
    """A case tests something: without its quirk the formulas give other logits."""
    plain = {
        "llama_rope_parameters": {"rope_parameters": {"rope_theta": 10000.0}},
        "phi3_short": {"original_max_position_embeddings": 100},
        "gemma3_rope_parameters": {"rope_parameters": {"rope_theta": 10000.0}},
        "llama_dynamic_long": {"rope_scaling": None},
        "gemma2_scale": {"embedding_multiplier": 9.797959 / 9.8125},
        "smollm3_list": {"no_rope_layers": [1, 1, 1, 0]},
    }.get(case, {"sliding_window": 200})
    config = zoo.config_of(case) | plain
    tensors = reference.unpacked(zoo.tensors(case), None)
    other = reference.logits_of(config, tensors, zoo.ids_of(case, 150), 150)
    want = expected(case, 150)
    assert np.abs(other - want).max() > 5 * TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_stacked_experts(case: str, bits: int, tmp_path: Path) -> None:
    """Experts in one tensor, as MLX writes them, as well as one by one."""
    folder = zoo.write(tmp_path / case, case, bits=bits, stacked=True)
    tensors = reference.unpacked(zoo.tensors(case, bits=bits, stacked=True), Quantization(4, 32))
    ids = zoo.ids_of(case, 60)
    want = reference.logits_of(zoo.config_of(case), tensors, ids, 60)
    got = run(load(folder, dtype="float32"), ids, 57)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize("case", zoo.PEERS)
def test_four_bits(case: str, tmp_path: Path) -> None:
    """Every architecture quantized, against float64 on the values that the codes stand for."""
    folder = zoo.write(tmp_path / case, case, bits=4, dtype="F16")
    tensors = reference.unpacked(zoo.tensors(case, bits=4, dtype="F16"), Quantization(4, 32))
    ids = zoo.ids_of(case, 70)
    want = reference.logits_of(zoo.config_of(case), tensors, ids, 70)
    got = run(load(folder, dtype="float32"), ids, 67)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())
