"""Whole models through the Metal backend, on the emulator, against float64.

Everything between a model and the text of a kernel is called here as it is on a Mac: what the
single tests of `tests/ops` cannot see is whether the backend hands them what models ask for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.generation import generate
from qrun.loader import load
from qrun.quantization import Quantization
from tests import reference, zoo
from tests.emulated import emulated
from tests.metal import Launch
from tests.reference_model import ReferenceModel
from tests.test_models import run
from tests.tiny import VOCAB, tiny

# SmolLM2-135M's sizes, but for layers and vocabulary.
SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rope_theta": 100000.0,
}


def kernels(launches: list[Launch]) -> set[str]:
    """Names of what ran, without the hash of the text."""
    return {launch.name.removeprefix("qrun_").rsplit("_", 1)[0] for launch in launches}


@pytest.mark.parametrize(("group", "dtype"), [(64, "float32"), (32, "float16")])
def test_a_small_smollm2_says_the_same(group: int, dtype: str, tmp_path: Path) -> None:
    """Greedy tokens of a prefill and the steps behind it, equal to the float64 model's."""
    folder = tiny(tmp_path, group_size=group, config=SMOLLM2, eos=VOCAB - 1)
    ids = [int(i) for i in np.random.default_rng(5).integers(0, 250, 37)]
    with emulated() as launches:
        model = load(folder, dtype=dtype, tune=False)
        tokens = generate(model, ids, max_tokens=7).tokens
    assert len(tokens) == 7
    assert kernels(launches) == {
        *("embedding", "qmm", "qmv", "rms_norm", "rope", "sdpa_decode", "sdpa_prefill"),
    }
    logits = ReferenceModel(folder).logits(ids + tokens[:-1])[len(ids) - 1 :]
    assert tokens == [int(i) for i in logits[:, : model.vocab].argmax(-1)]


KINDS = [
    "qwen3",  # q and k norms, heads wider than K / H
    "gemma2_window",  # softcaps, GEGLU, a window in every other layer, scaled embedding
    "qwen2",  # biases of q, k and v
    "llama",  # biases everywhere, a head of 24 dims
    "phi3",  # one matrix for qkv and one for gate and up; a part of each head is rotated
    "smollm3",  # layers without positions
    "cohere2",  # layer norms, neighbouring dims rotated
    "mixtral",  # experts: MLX's product behind our norm, in front of our attention
]


@pytest.mark.parametrize("case", KINDS)
def test_other_layers(case: str, tmp_path: Path) -> None:
    folder = zoo.write(tmp_path / case, case, bits=4, dtype="F16")
    tensors = reference.unpacked(zoo.tensors(case, bits=4, dtype="F16"), Quantization(4, 32))
    ids = zoo.ids_of(case, 52)
    want = reference.logits_of(zoo.config_of(case), tensors, ids, 52)
    with emulated() as launches:
        got = run(load(folder, dtype="float32", tune=False), ids, 50)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
    assert {"qmm", "qmv", "rope", "sdpa_decode", "sdpa_prefill"} <= kernels(launches)


def test_mixed_bits_and_an_8_bit_embedding(tmp_path: Path) -> None:
    """Formats that differ within a layer are products of their own, joined behind."""
    layers = {
        "model.embed_tokens": {"group_size": 64, "bits": 8},
        "model.layers.0.self_attn.v_proj": {"group_size": 32, "bits": 6},
        "model.layers.1.mlp.down_proj": {"group_size": 128, "bits": 3},
        "model.layers.1.mlp.up_proj": {"group_size": 64, "bits": 4},
    }
    folder = tiny(tmp_path, layers=layers, dtype="BF16", dense=["layers.0.mlp.down_proj"])
    ids = list(range(20, 45))
    want = ReferenceModel(folder).logits(ids)
    with emulated():
        got = run(load(folder, dtype="float32", tune=False), ids, 23)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_a_cache_that_kernels_cannot_write_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should MLX ever hand kernels copies of their inputs: slower text, not nonsense."""
    folder = tiny(tmp_path)
    ids = list(range(20, 40))
    with emulated() as launches:
        ours = mx.fast.metal_kernel

        def copying(**arguments: Any) -> Any:
            run = ours(**arguments)

            def call(inputs: list[mx.array], **more: Any) -> Any:
                return run(inputs=[mx.array(a) for a in inputs], **more)

            return call

        monkeypatch.setattr(mx.fast, "metal_kernel", copying)
        with pytest.warns(UserWarning, match="does not let a kernel append to the cache"):
            got = run(load(folder, dtype="float32", tune=False), ids, 17)
        monkeypatch.undo()
    want = ReferenceModel(folder).logits(ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
    assert [launch.name.startswith("qrun_rope") for launch in launches].count(True) == 1
