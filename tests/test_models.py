"""Every architecture against mlx-lm's recorded numbers, and against numpy in float64."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from qrun.checkpoint import Checkpoint
from qrun.errors import CheckpointError
from qrun.generation import decode_step
from qrun.loader import LoadedModel, default_dtype, load, read_config
from qrun.ops import _launch
from qrun.paths import MODELS
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
        mx.async_eval(found[-1])  # state is written in place: one after the other
        state.advance(part.size)
    step = decode_step(model, state)
    for token in ids[prefill:]:
        found.append(step(mx.array([token], mx.int32)))
        # A generated token depends on the step before; these do not.
        mx.async_eval(found[-1])
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
def test_four_bits(case: str, tmp_path: Path, backend: Any) -> None:
    """Every architecture quantized: a 300-token prefill and steps, against float64."""
    folder = zoo.write(tmp_path / case, case, bits=4, dtype="F16")
    tensors = reference.unpacked(zoo.tensors(case, bits=4, dtype="F16"), Quantization(4, 32))
    ids = zoo.ids_of(case, 306)
    want = reference.logits_of(zoo.config_of(case), tensors, ids, 306)
    got = run(load(folder, dtype="float32"), ids, 300)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.native
@pytest.mark.parametrize("case", [
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "smollm3", "granite",
    "gemma2", "gemma3_text", "olmo2", "cohere2", "qwen3_moe with a dense router",
])  # fmt: skip
def test_a_step_is_one_recorded_primitive(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routing included: an op of MLX in between would cost the whole step its replay."""
    from qrun import _ext

    made: list[_ext.Program] = []
    program = _ext.Program

    def record(inputs: list[mx.array], outputs: list[mx.array]) -> _ext.Program:
        made.append(program(inputs, outputs))
        return made[-1]

    def dense_router(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith("mlp.gate.scales")]:
            path = name.removesuffix(".scales")
            shape = (tensors[name][1].shape[0], zoo.BASE["hidden_size"])
            for part in ("scales", "biases"):
                del tensors[f"{path}.{part}"]
            tensors[f"{path}.weight"] = ("F32", np.ones(shape, np.float32))

    monkeypatch.setattr(_ext, "Program", record)
    case, _, dense = case.partition(" with ")
    edit = dense_router if dense else None
    model = load(zoo.write(tmp_path / case, case, bits=4, dtype="F16", edit=edit), dtype="float32")
    assert any("mlp.gate: not quantized" in note for note in model.notes) == bool(dense)
    run(model, list(range(6)), 3)
    assert len(made) == 1


@pytest.mark.parametrize("bits", [0, 4])
def test_gemma3_beside_a_vision_tower(bits: int, tmp_path: Path) -> None:
    """model_type gemma3: text under language_model. and in text_config, the tower left alone."""

    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        text = {**config, "model_type": "gemma3_text"}
        quantization = text.pop("quantization", None)
        text.pop("tie_word_embeddings")
        config.clear()
        config |= {"model_type": "gemma3", "text_config": text, "vision_config": {"depth": 2}}
        if quantization:
            config["quantization"] = {**quantization, "language_model.a.b": {"bits": 8}}
        inner = {f"language_model.{name}": stored for name, stored in tensors.items()}
        tensors.clear()
        tensors |= inner
        tensors["vision_tower.blocks.0.weight"] = ("F32", np.zeros((3, 4), np.float32))
        tensors["multi_modal_projector.weight"] = ("F32", np.zeros((5,), np.float32))

    case = "gemma3_text"
    model = load(zoo.write(tmp_path / "m", case, bits=bits, edit=edit), dtype="float32")
    ids = zoo.ids_of(case, 60)
    tensors = reference.unpacked(zoo.tensors(case, bits=bits), Quantization(4, 32))
    want = reference.logits_of(zoo.config_of(case), tensors, ids, 60)
    got = run(model, ids, 57)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())
    assert model.context == zoo.config_of(case)["max_position_embeddings"]


def test_gemma3_may_leave_out_what_it_always_has(tmp_path: Path) -> None:
    """gemma 3 4b's text_config has neither heads nor a context length."""
    short = {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "sliding_window": 1024}}
    (tmp_path / "config.json").write_text(json.dumps(short))
    config, _ = read_config(tmp_path)
    assert config.int("head_dim") == 256
    assert config.int("num_key_value_heads") == 4
    assert config.int("max_position_embeddings") == 131072
    assert config.int("sliding_window") == 1024
    assert config.str("model_type") == "gemma3"


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("granite", {"mlp_bias": True}, "mlp_bias is True"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must not be 0"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 4 layers"),
        ("llama_window", {"layer_types": ["full_attention"]}, "layer_types must be 3 times"),
        ("llama_window", {"layer_types": ["x", "y", "z"]}, "layer_types must be 3 times"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok must be a whole number, 1 to"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "must have one for full_att"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved is True"),
        ("llama", {"rope_traditional": True}, "rope_traditional is True"),
        ("llama", {"head_dim": 25}, "head_dim 25 is odd"),
        ("llama", {"num_hidden_layers": 9999}, "the weights are not those that config.json"),
    ],
)
def test_what_is_not_implemented_is_refused(
    case: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """One line, never plausible text."""

    def edit(config: dict[str, Any], _: Any) -> None:
        config |= change

    with pytest.raises(CheckpointError, match=message):
        load(zoo.write(tmp_path / "m", case, edit=edit))


def test_the_compute_type_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the scales; of the norms where nothing is quantized; float32 on a CPU."""
    folder = zoo.write(tmp_path / "m", "llama", bits=4, dtype="BF16")
    scales = Checkpoint(folder).tensors
    dense = Checkpoint(zoo.write(tmp_path / "n", "llama", dtype="F16")).tensors
    assert default_dtype(scales) == mx.float32
    gpu = SimpleNamespace(type=mx.gpu)
    monkeypatch.setattr(mx, "default_device", lambda: gpu)
    monkeypatch.setattr(_launch, "backend", lambda: SimpleNamespace(NAME="cuda"))
    assert default_dtype(scales) == mx.bfloat16
    assert default_dtype(dense) == mx.float16


@pytest.mark.parametrize("case", ["gemma2", "mixtral", "cohere2", "llama"])
@pytest.mark.parametrize("bits", [0, 4])
def test_case_19_no_compiler_at_run_time(
    case: str, bits: int, tmp_path: Path, python: Callable[..., str]
) -> None:
    """Steps with elementwise ops between the kernels, too: MLX would compile C++ where it fuses."""
    folder = zoo.write(tmp_path / "m", case, bits=bits, dtype="F16")
    temporary = tmp_path / "t"
    temporary.mkdir()
    code = (
        "import sys, warnings; warnings.simplefilter('ignore');"
        "from pathlib import Path; from qrun.loader import load; from tests.test_models import run;"
        "print(run(load(sys.argv[1]), list(range(9)), 5).shape)"
    )
    assert python(code, folder, TMPDIR=str(temporary)).strip() == f"(9, {zoo.VOCAB})"
    assert list(temporary.iterdir()) == []


def test_files_stay_short() -> None:
    """Each architecture reads in one sitting, and knows no bits, files or backends."""
    for path in MODELS.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 150, path
        imported = set(re.findall(r"^from (\S+) import", text, re.MULTILINE))
        allowed = {"blocks", "cache", "config", "errors", "layers", "positions", "weights"}
        assert imported <= {"__future__", *(f"qrun.{name}" for name in allowed)}, path
