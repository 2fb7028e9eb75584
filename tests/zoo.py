"""One tiny model per architecture and quirk: configs, and weights from a seed.

Numpy only and apart from qrun, like tests/tiny.py: scripts/record_fixtures.py builds the same
folders for mlx-lm in another environment, so no weights are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests import tiny

VOCAB = 288
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], "long_factor": [1.5, 2, 3, 5, 8, 12]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
GEMMA2 = GEMMA | {
    "model_type": "gemma2",
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3 = GEMMA | {
    "model_type": "gemma3_text",
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 40,
    "sliding_window_pattern": 3,
    "num_hidden_layers": 4,
}
PHI3 = {"model_type": "phi3", "partial_rotary_factor": 0.75}
MOE = {"num_experts_per_tok": 2, "num_hidden_layers": 2}
QWEN3_MOE = MOE | {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 6,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
SMOLLM3 = {"model_type": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": True}

# name -> config. Those in PEERS are equal to mlx-lm's; of the others it knows less than it should.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 24, "attention_bias": True, "mlp_bias": True},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_dynamic": {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama_llama3": {"model_type": "llama", "rope_scaling": LLAMA3},
    "llama_yarn": {"model_type": "llama", "rope_scaling": YARN},
    "llama_window": {
        "model_type": "llama",
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mistral": {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_plain": QWEN3_MOE | {"norm_topk_prob": False, "mlp_only_layers": [1]},
    "mixtral": MOE | {"model_type": "mixtral", "num_local_experts": 4},
    "gemma2": GEMMA2 | {"sliding_window": 4096},
    "gemma3_text": GEMMA3,
    "phi3": PHI3,
    "phi3_long": PHI3
    | {
        "head_dim": None,
        "original_max_position_embeddings": 128,
        "rope_scaling": {"type": "longrope", **LONG},
    },
    "smollm3": SMOLLM3,
    "granite": {
        "model_type": "granite",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_multiplier": 0.1,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2", "rope_theta": 500000},
    "cohere2": {
        "model_type": "cohere2",
        "head_dim": 16,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "num_hidden_layers": 4,
        "rope_theta": 50000.0,
        "sliding_window": 40,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    },
}
PEERS = tuple(CASES)
CASES |= {
    # mlx-lm uses the long factors whatever the length.
    "phi3_short": PHI3
    | {
        "original_max_position_embeddings": 512,
        "rope_scaling": {"type": "longrope", **LONG},
    },
    "phi3_window": PHI3 | {"sliding_window": 40},
    # It does not read rope_parameters.
    "llama_rope_parameters": {
        "model_type": "llama",
        "rope_theta": None,
        "rope_parameters": {**LLAMA3, "rope_theta": 500000.0},
    },
    "gemma3_rope_parameters": GEMMA3
    | {
        "rope_theta": None,
        "rope_local_base_freq": None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    # A text longer than the context it was trained with: one base for all of it.
    "llama_dynamic_long": {
        "model_type": "llama",
        "rope_scaling": {
            "type": "dynamic",
            "factor": 2.0,
            "original_max_position_embeddings": 128,
        },
    },
    # It has no windows in these.
    "mistral_window": {"model_type": "mistral", "sliding_window": 40},
    "gemma2_window": GEMMA2 | {"sliding_window": 40},
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    # sqrt(96) is not a bfloat16, and gemma was trained with the one next to it.
    "gemma2_scale": GEMMA2 | {"hidden_size": 96, "head_dim": 24, "sliding_window": 4096},
    # Every group size divides its widths.
    "llama_wide": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
    },
    "smollm3_list": SMOLLM3 | {"no_rope_layers": [0, 1, 1, 0]},
}


def config_of(case: str) -> dict[str, Any]:
    """The whole config.json of a case."""
    return {k: v for k, v in {**BASE, **CASES[case]}.items() if v is not None}


def seed_of(case: str) -> int:
    return sum(case.encode())


def ids_of(case: str, count: int) -> list[int]:
    """The text every test of a case reads."""
    rng = np.random.default_rng(seed_of(case) + 1)
    return [int(i) for i in rng.integers(0, VOCAB, count)]


def shapes(c: Mapping[str, Any], *, stacked: bool = False) -> tiny.Shapes:
    """Every tensor of a config. stacked: experts in one tensor, as MLX writes them."""
    kind, k, n = c["model_type"], c["hidden_size"], c["intermediate_size"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or k // heads
    gemma, norm = kind.startswith("gemma"), "norm"
    found: tiny.Shapes = [("model.embed_tokens.weight", (c["vocab_size"], k), "matrix")]

    def add(name: str, *shape: int, bias: bool = False) -> None:
        found.append((f"{name}.weight", shape, "matrix" if len(shape) > 1 else norm))
        if bias:
            found.append((f"{name}.bias", shape[:1], "bias"))

    def mlp(at: str, width: int, names: tuple[str, str, str]) -> None:
        gate, up, down = names
        bias = c.get("mlp_bias", False)
        add(f"{at}.{gate}", width, k, bias=bias)
        add(f"{at}.{up}", width, k, bias=bias)
        add(f"{at}.{down}", k, width, bias=bias)

    def experts(at: str, count: int, width: int, names: tuple[str, str, str]) -> None:
        add(f"{at}.gate", count, k)
        if stacked:
            add(f"{at}.switch_mlp.gate_proj", count, width, k)
            add(f"{at}.switch_mlp.up_proj", count, width, k)
            add(f"{at}.switch_mlp.down_proj", count, k, width)
            return
        for e in range(count):
            mlp(f"{at}.experts.{e}", width, names)

    names = ("gate_proj", "up_proj", "down_proj")
    qkv_bias = kind == "qwen2" or c.get("attention_bias", False)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        attention = f"{at}.self_attn"
        if kind != "olmo2":
            add(f"{at}.input_layernorm", k)
        if kind == "phi3":
            add(f"{attention}.qkv_proj", (heads + 2 * kv_heads) * d, k)
        else:
            add(f"{attention}.q_proj", heads * d, k, bias=qkv_bias)
            add(f"{attention}.k_proj", kv_heads * d, k, bias=qkv_bias)
            add(f"{attention}.v_proj", kv_heads * d, k, bias=qkv_bias)
        add(f"{attention}.o_proj", k, heads * d, bias=qkv_bias and kind != "qwen2")
        if kind in ("qwen3", "qwen3_moe", "gemma3_text", "olmo2"):
            wide = kind == "olmo2"
            add(f"{attention}.q_norm", heads * d if wide else d)
            add(f"{attention}.k_norm", kv_heads * d if wide else d)
        if kind != "cohere2":
            add(f"{at}.post_attention_layernorm", k)
        if gemma:
            add(f"{at}.pre_feedforward_layernorm", k)
        if gemma or kind == "olmo2":
            add(f"{at}.post_feedforward_layernorm", k)
        if kind == "phi3":
            add(f"{at}.mlp.gate_up_proj", 2 * n, k)
            add(f"{at}.mlp.down_proj", k, n)
        elif kind == "mixtral":
            experts(f"{at}.block_sparse_moe", c["num_local_experts"], n, ("w1", "w3", "w2"))
        elif kind == "qwen3_moe" and i not in c["mlp_only_layers"]:
            experts(f"{at}.mlp", c["num_experts"], c["moe_intermediate_size"], names)
        else:
            mlp(f"{at}.mlp", n, names)
    add("model.norm", k)
    if not c["tie_word_embeddings"]:
        add("lm_head", c["vocab_size"], k)
    return found


def tensors(
    case: str,
    *,
    bits: int = 0,
    group_size: int = 32,
    mode: str = "affine",
    dtype: str = "F32",
    stacked: bool = False,
) -> dict[str, tiny.Stored]:
    """The weights of a case, by name; bits 0: not quantized. The same whatever numpy is used."""
    config = config_of(case)
    rng = np.random.default_rng(seed_of(case))
    plus_one = config["model_type"].startswith("gemma")
    found: dict[str, tiny.Stored] = {}
    for name, shape, kind in shapes(config, stacked=stacked):
        if bits and kind == "matrix":
            path, (*lead, n, k) = name.removesuffix(".weight"), shape
            spec = {"bits": bits, "group_size": group_size, "mode": mode, "dtype": dtype}
            rows = int(np.prod([*lead, n]))
            for part, (type_name, array) in tiny.quantized(rng, path, rows, k, **spec).items():
                found[part] = (type_name, array.reshape(*lead, n, -1))
        else:
            values = tiny.random_dense(rng, shape, kind)
            if plus_one and kind == "norm":
                values = values - 1
            found[name] = tiny.stored(values, dtype)
    return found


def write(
    folder: Path,
    case: str,
    *,
    bits: int = 0,
    group_size: int = 32,
    mode: str = "affine",
    dtype: str = "F32",
    stacked: bool = False,
    shards: int = 1,
    edit: Callable[[dict[str, Any], dict[str, tiny.Stored]], None] | None = None,
) -> Path:
    """The whole checkpoint of a case. edit: changes config and tensors before they are written."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(case)
    if bits:
        config["quantization"] = {"bits": bits, "group_size": group_size, "mode": mode}
    found = tensors(case, bits=bits, group_size=group_size, mode=mode, dtype=dtype, stacked=stacked)
    if edit is not None:
        edit(config, found)
    tiny.write_weights(folder, found, shards)
    tiny.write_json(folder / "config.json", config)
    tiny.byte_level().save(str(folder / "tokenizer.json"))
    return folder


def probe(count: int = VOCAB) -> npt.NDArray[np.float64]:
    """A random direction of length 1: logits times it are one number that every logit moves."""
    v = np.random.default_rng(7).normal(size=count)
    return v / np.linalg.norm(v)
