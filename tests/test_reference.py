"""Every architecture and form of checkpoint against the float64 reference, on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.generation import decode_step, prefill
from qrun.loader import LoadedModel, load
from qrun.ops import _launch
from tests.reference_model import ReferenceModel
from tests.tiny import tiny

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 260, 48)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama untied, sharded": {"tied": False, "shards": 3},
    "llama bf16": {"dtype": "BF16"},
    "llama f32 scales": {"dtype": "F32"},
    "llama 8 bits": {"bits": 8, "group_size": 64},
    "llama 3 bits": {"bits": 3, "group_size": 64},
    "llama 2 bits": {"bits": 2, "group_size": 128},
    "llama 5 bits": {"bits": 5},
    "llama 6 bits": {"bits": 6},
    "llama dense": {"bits": 0},
    "llama biases": {"config": {"attention_bias": True, "mlp_bias": True}},
    "llama implicit head_dim": {"config": {"head_dim": None}},
    "llama no grouping": {"config": {"num_key_value_heads": 4}},
    "llama linear rope": {"config": {"rope_scaling": {"type": "linear", "factor": 2.5}}},
    "llama llama3 rope": {"config": {"rope_scaling": LLAMA3}},
    "llama rope_parameters": {
        "config": {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        }
    },
    "mistral": {"arch": "mistral"},
    "qwen2": {"arch": "qwen2"},
    "qwen2 untied": {"arch": "qwen2", "tied": False, "group_size": 64},
    "qwen3": {"arch": "qwen3"},
    "qwen3 bf16 sharded": {"arch": "qwen3", "dtype": "BF16", "shards": 2, "tied": False},
}


def step_by_step(model: LoadedModel, ids: list[int], first: int) -> np.ndarray:
    """Logits behind the first `first` ids in one prefill, then behind each id after them."""
    cache = model.new_cache(len(ids))
    rows = [prefill(model, ids[:first], cache)]
    step = decode_step(model, cache)
    for token in ids[first:]:
        rows.append(step(mx.array([token], mx.int32)))
        mx.eval(rows[-1])
    return np.array(mx.concatenate(rows).astype(mx.float32)).astype(np.float64)


@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_the_reference(backend: Any, form: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, **FORMS[form])
    want = ReferenceModel(folder).logits(IDS)[20:]
    got = step_by_step(load(folder, dtype="float32"), IDS, 21)
    # Float32 noise through two layers; a wrong rotation, bias or order is off by tenths.
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_case_04_sixteen_bit_activations_stay_sixteen_bit(
    backend: Any, dtype: str, tmp_path: Path
) -> None:
    """Scales in f16, activations in bf16 or f16: hidden states, cache and logits keep the type."""
    folder = tiny(tmp_path, dtype="F16")
    model = load(folder, dtype=dtype)
    cache = model.new_cache(8)
    hidden = model.model(mx.array([1, 2, 3], mx.int32), cache)
    kind = getattr(mx, dtype)
    assert hidden.dtype == kind
    assert {a.dtype for a in (*cache.keys, *cache.values)} == {kind}
    assert model.model.logits(hidden).dtype == kind
    want = ReferenceModel(folder).logits([1, 2, 3])[-1]
    got = np.array(model.model.logits(hidden)[-1].astype(mx.float32))
    rounding = 2.0 ** (-8 if dtype == "bfloat16" else -11)
    assert np.abs(got - want).max() <= 16 * rounding * np.abs(want).max()


@pytest.mark.parametrize("dense", ["q_proj", "gate_proj", "embed_tokens", "layers.1"])
def test_case_12_dense_layers_among_quantized_ones(
    backend: Any, dense: str, tmp_path: Path
) -> None:
    folder = tiny(tmp_path, dense=[dense])
    want = ReferenceModel(folder).logits(IDS)[20:]
    got = step_by_step(load(folder, dtype="float32"), IDS, 21)
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


def test_case_12_mixed_bits_and_groups(backend: Any, tmp_path: Path) -> None:
    mixed = {
        "model.embed_tokens": {"bits": 8, "group_size": 64},
        "model.layers.0.self_attn.v_proj": {"bits": 6, "group_size": 32},
        "model.layers.1.mlp.up_proj": {"bits": 8, "group_size": 128},
        "model.layers.1.mlp.down_proj": {"bits": 2, "group_size": 64},
    }
    folder = tiny(tmp_path, layers=mixed)
    model = load(folder, dtype="float32")
    want = ReferenceModel(folder).logits(IDS)[20:]
    assert np.abs(step_by_step(model, IDS, 21) - want).max() <= 2e-5 * np.abs(want).max()
    assert len([note for note in model.notes if "formats differ" in note]) == 2


def test_case_15_new_style_rope_parameters_at_long_positions(backend: Any, tmp_path: Path) -> None:
    """A theta of 77 at position 300 is another world than the default of 10000."""
    rule = {"rope_type": "default", "rope_theta": 77.0}
    folder = tiny(tmp_path, config={"rope_theta": None, "rope_parameters": rule})
    ids = (IDS * 7)[:300]
    want = ReferenceModel(folder).logits(ids)[-1]
    got = step_by_step(load(folder, dtype="float32"), ids, 300)[-1]
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


def test_prefill_in_chunks_equals_one_chunk(
    backend: Any, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_folder)
    whole = step_by_step(model, IDS, len(IDS))
    monkeypatch.setattr(_launch.backend(), "PREFILL_ROWS", 7)
    parts = step_by_step(model, IDS, len(IDS))
    assert np.abs(whole - parts).max() <= 1e-5 * np.abs(whole).max()


def test_steps_queued_without_waiting_keep_their_order(backend: Any, tiny_folder: Path) -> None:
    """A step must follow the one before it also where nothing but the cache connects the two."""
    model = load(tiny_folder, dtype="float32")
    cache = model.new_cache(len(IDS))
    rows = [prefill(model, IDS[:21], cache)]
    step = decode_step(model, cache)
    rows += [step(mx.array([token], mx.int32)) for token in IDS[21:]]
    got = np.array(mx.concatenate(rows)).astype(np.float64)
    assert np.abs(got - step_by_step(model, IDS, 21)).max() <= 1e-5 * np.abs(got).max()
