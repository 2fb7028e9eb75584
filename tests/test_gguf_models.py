"""GGUF files of every architecture, at tiny sizes: names, values, config, and that they load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.convert import convert
from qrun.errors import CheckpointError
from qrun.gguf_models import ARCHITECTURES
from qrun.loader import load
from tests.gguf_writer import reference, tiny_gguf, write_gguf

NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
GEMMA_NORMS = NORMS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "vocab_size": 268,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "use_sliding_window": False,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "head_dim": 32,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "torch_dtype": "bfloat16",
    },
    "phi3": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "sliding_window": 16,
    },
}


def converted(
    tmp_path: Path, arch: str, kind: str = "F16", changes: dict[str, Any] | None = None, **more: Any
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    metadata, tensors = tiny_gguf(np.random.default_rng(4), kind, arch=arch)
    metadata |= {f"{arch}.{key}": value for key, value in (changes or {}).items()}
    tensors |= more.pop("tensors", {})
    src = write_gguf(tmp_path / "in.gguf", metadata, tensors)
    convert(src, tmp_path / "out", force=True, **more)
    config = json.loads((tmp_path / "out/config.json").read_text())
    found = mx.load(str(tmp_path / "out/model.safetensors"))
    assert isinstance(found, dict)
    return config, found


@pytest.mark.parametrize("arch", CONFIGS)
def test_config(tmp_path: Path, arch: str) -> None:
    config, _ = converted(tmp_path, arch)
    assert config == COMMON | CONFIGS[arch]


@pytest.mark.parametrize("arch", CONFIGS)
def test_names_and_values(tmp_path: Path, arch: str) -> None:
    """Every tensor arrives, under its name, to float32's rounding; gemma's norms lose their 1."""
    _, found = converted(tmp_path, arch, dtype="float32")
    _, tensors = tiny_gguf(np.random.default_rng(4), "F16", arch=arch)
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    blocks = MATRICES | (GEMMA_NORMS if arch == "gemma3" else NORMS)
    if arch == "phi3":
        blocks = blocks | {"ffn_up": "mlp.gate_up_proj"}
    assert len(found) == len(tensors)
    for name, (kind, shape, raw) in tensors.items():
        *block, role, leaf = name.split(".")
        new = f"model.layers.{block[1]}.{blocks[role]}" if block else outer[role]
        expected = reference(kind, raw).reshape(shape).astype(np.float32)
        if arch == "gemma3" and "norm" in role:
            expected = expected - np.float32(1)
        np.testing.assert_array_equal(np.array(found.pop(f"{new}.{leaf}")), expected)
    assert not found


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["Q4_0", "F32"])
def test_it_loads(tmp_path: Path, arch: str, kind: str) -> None:
    converted(tmp_path, arch, kind, bits=None if kind == "Q4_0" else 8)
    model = load(tmp_path / "out").model
    assert model is not None


def f32(*values: float) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", (len(values),), np.array(values, "<f4").tobytes()


def test_phi3_longrope(tmp_path: Path) -> None:
    short, long = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5), (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    config, _ = converted(
        tmp_path,
        "phi3",
        changes={
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(4) / np.log(32))),
        },
        tensors={"rope_factors_short.weight": f32(*short), "rope_factors_long.weight": f32(*long)},
    )
    assert config["partial_rotary_factor"] == 0.75
    assert config["original_max_position_embeddings"] == 32
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "type": "longrope",
        "short_factor": list(short),
        "long_factor": list(long),
    }


def test_phi3_other_magnitude(tmp_path: Path) -> None:
    factors = f32(*[1.0] * 8)
    config, _ = converted(
        tmp_path,
        "phi3",
        changes={
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 1.25,
            "rope.scaling.type": "longrope",
        },
        tensors={"rope_factors_short.weight": factors, "rope_factors_long.weight": factors},
    )
    assert config["rope_scaling"]["attention_factor"] == 1.25


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention.sliding_window_pattern": 2}, {"sliding_window_pattern": 2}),
        ({"attention.sliding_window_pattern": [True, False]}, {"sliding_window_pattern": 2}),
        ({"attention.sliding_window_pattern": [True, True]}, {"sliding_window_pattern": 3}),
        ({"rope.freq_base_swa": 20000.0}, {"rope_local_base_freq": 20000.0}),
        ({"final_logit_softcapping": 30.0}, {"final_logit_softcapping": 30.0}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
    ],
)
def test_gemma3_settings(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config, _ = converted(tmp_path, "gemma3", changes=changes)
    assert config.items() >= expected.items()


def test_yarn_settings(tmp_path: Path) -> None:
    config, _ = converted(
        tmp_path,
        "qwen3",
        changes={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.attn_factor": 2.0,
        },
    )
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "attention_factor": pytest.approx(2 * (0.1 * np.log(4) + 1)),
    }


@pytest.mark.parametrize(
    ("arch", "changes", "tensors", "reason"),
    [
        ("qwen3", {"rope.dimension_count": 16}, {}, "rope turns 16 of 32"),
        ("gemma3", {"attention.sliding_window_pattern": [False, True]}, {}, "no regular pattern"),
        ("phi3", {}, {"rope_factors_long.weight": f32(*[1.0] * 8)}, "only one of rope_factors"),
        ("phi3", {"rope.scaling.type": "longrope"}, {}, "unknown rope scaling type 'longrope'"),
        ("qwen2", {}, {"blk.0.ffn_up.bias": f32(*[0.0] * 96)}, "has no place in a qwen2 model"),
        ("qwen2", {}, {"rope_freqs.weight": f32(1.0, 2.0)}, "does not fit 8 frequencies"),
        (
            "llama",
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            {"rope_freqs.weight": f32(*[1.0] * 4, *[8.0] * 4)},
            "not Llama 3's scaling",
        ),
        ("llama", {"attention.layer_norm_rms_epsilon": float("inf")}, {}, "epsilon is inf"),
        ("llama", {"attention.layer_norm_rms_epsilon": -1.0}, {}, "epsilon is -1"),
        ("llama", {"rope.freq_base": -1e4}, {}, "rope.freq_base is -10000"),
        ("llama", {}, {"output_norm.weight": ("Q8_0", (64,), bytes(68))}, "stored in blocks"),
        ("llama", {}, {"blk.0.attn_q.bias": f32(*[0.0] * 64)}, "attn_k.bias"),
    ],
)
def test_refuses_by_name(
    tmp_path: Path, arch: str, changes: dict[str, Any], tensors: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=r"in\.gguf: ") as error:
        converted(tmp_path, arch, changes=changes, tensors=tensors)
    assert reason in str(error.value)


def test_rarer_types_are_quantized_anew(tmp_path: Path) -> None:
    """Types that only the gguf package reads, here IQ4_NL, against its own values."""
    quants = pytest.importorskip("gguf.quants")
    kinds = pytest.importorskip("gguf.constants").GGMLQuantizationType
    _, found = converted(tmp_path, "qwen2", "IQ4_NL", mode="mxfp8")
    _, tensors = tiny_gguf(np.random.default_rng(4), "IQ4_NL", arch="qwen2")
    _, shape, raw = tensors["blk.1.ffn_down.weight"]
    rows = np.frombuffer(raw, np.uint8).reshape(shape[0], -1)
    values = quants.dequantize(rows, kinds.IQ4_NL).astype(np.float32)
    w, scales = mx.quantize(mx.array(values), group_size=32, bits=8, mode="mxfp8", stream=mx.cpu)
    assert mx.array_equal(found["model.layers.1.mlp.down_proj.weight"], w).item()
    assert mx.array_equal(found["model.layers.1.mlp.down_proj.scales"], scales).item()
