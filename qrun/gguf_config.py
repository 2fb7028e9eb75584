"""config.json from a GGUF's metadata: sizes, positions, and what single architectures add."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from qrun.errors import CheckpointError
from qrun.gguf import GGUF
from qrun.gguf_blocks import dequantize

Json = dict[str, Any]


class Numbers:
    """The numbers under one architecture's prefix: 0 or more, one for all layers, or refused."""

    def __init__(self, gguf: GGUF, prefix: str) -> None:
        self.gguf, self.path, self.prefix = gguf, gguf.path, prefix

    def number(self, key: str, default: float | None = None) -> float:
        # a float32 such as 9.999999747378752e-06 is written as the 1e-05 that it came from
        return float(str(np.float32(self._raw(key, default))))

    def count(self, key: str, default: int | None = None) -> int:
        value = self._raw(key, default)
        if value != int(value):
            raise CheckpointError(f"{self.path}: metadata {self.prefix}.{key} is {value}")
        return int(value)

    def _raw(self, key: str, default: float | None) -> float:
        value = self.gguf.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None:
            raise CheckpointError(f"{self.path}: metadata {self.prefix}.{key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(
                f"{self.path}: metadata {self.prefix}.{key} is not one number for all layers"
            )
        if not 0 <= value < math.inf:
            raise CheckpointError(f"{self.path}: metadata {self.prefix}.{key} is {value}")
        return value


def sizes(gguf: GGUF, numbers: Numbers) -> Json:
    """What every architecture has."""
    hidden, layers = numbers.count("embedding_length"), numbers.count("block_count")
    heads = numbers.count("attention.head_count")
    kv_heads = numbers.count("attention.head_count_kv", heads)
    head_dim = numbers.count("attention.key_length", hidden // max(heads, 1))
    if (
        min(hidden, heads, kv_heads, layers, head_dim) < 1
        or heads % kv_heads
        or head_dim % 2
        or layers > len(gguf.tensors)
    ):
        raise CheckpointError(
            f"{gguf.path}: no model has {layers} layers, {heads} heads of {head_dim} on "
            f"{kv_heads}, and {len(gguf.tensors)} tensors"
        )
    if numbers.count("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{gguf.path}: keys and values of different lengths")
    if "token_embd.weight" not in gguf.tensors:
        raise CheckpointError(f"{gguf.path}: tensor token_embd.weight is missing")
    return {
        "hidden_size": hidden,
        "intermediate_size": numbers.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": numbers.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": numbers.count("context_length"),
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }


# ---- what single architectures add


def llama(gguf: GGUF, numbers: Numbers, config: Json) -> Json:
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
    }


def qwen2(gguf: GGUF, numbers: Numbers, config: Json) -> Json:
    return {"hidden_act": "silu", "use_sliding_window": False}


def qwen3(gguf: GGUF, numbers: Numbers, config: Json) -> Json:
    return {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def qwen3_moe(gguf: GGUF, numbers: Numbers, config: Json) -> Json:
    count, top = _experts(gguf, numbers)
    return qwen3(gguf, numbers, config) | {
        "num_experts": count,
        "num_experts_per_tok": top,
        "moe_intermediate_size": numbers.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def mixtral(gguf: GGUF, numbers: Numbers, config: Json) -> Json:
    count, top = _experts(gguf, numbers)
    return {"hidden_act": "silu", "num_local_experts": count, "num_experts_per_tok": top}


def _experts(gguf: GGUF, numbers: Numbers) -> tuple[int, int]:
    """How many experts, and how many a token takes; what else a router could do is refused."""
    count, top = numbers.count("expert_count"), numbers.count("expert_used_count")
    if not 1 <= top <= count:
        raise CheckpointError(f"{gguf.path}: {top} of {count} experts a token")
    for key, plain in (
        ("expert_shared_count", (0,)),
        ("expert_gating_func", (0, 1)),  # softmax
        ("expert_weights_scale", (0, 1)),
        ("expert_group_count", (0, 1)),
    ):
        if numbers.number(key, 0.0) not in plain:
            raise CheckpointError(f"{gguf.path}: metadata {numbers.prefix}.{key} is not converted")
    return count, top


def phi3(gguf: GGUF, numbers: Numbers, config: Json) -> Json:
    added: Json = {"hidden_act": "silu", "attention_bias": False}
    window = numbers.count("attention.sliding_window", 0)
    if window:
        added["sliding_window"] = window
    return added


def gemma3(gguf: GGUF, numbers: Numbers, config: Json) -> Json:
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == 62:  # only the 27B model divides by the hidden size
        scalar = config["hidden_size"] // config["num_attention_heads"]
    added: Json = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window": numbers.count("attention.sliding_window"),
        "sliding_window_pattern": _window_pattern(gguf, numbers, config["num_hidden_layers"]),
        "rope_local_base_freq": numbers.number("rope.freq_base_swa", 10000.0),
    }
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if numbers.number(key, 0.0):
            added[key] = numbers.number(key)
    return added


def _window_pattern(gguf: GGUF, numbers: Numbers, layers: int) -> int:
    """Every how many layers one sees everything; a list says of each layer if it has a window."""
    listed = gguf.metadata.get(f"{numbers.prefix}.attention.sliding_window_pattern")
    if not isinstance(listed, np.ndarray):
        return numbers.count("attention.sliding_window_pattern", 6)
    windows = [bool(w) for w in listed]
    pattern = windows.index(False) + 1 if False in windows else layers + 1
    if windows != [(i + 1) % pattern != 0 for i in range(layers)]:
        raise CheckpointError(f"{gguf.path}: its sliding windows follow no regular pattern")
    return pattern


# ---- positions


def rope(gguf: GGUF, numbers: Numbers, config: Json, *, partial: bool) -> Json:
    """rope_theta and, where positions are scaled, rope_scaling. `partial`: may turn fewer dims."""
    found: Json = {"rope_theta": numbers.number("rope.freq_base", 10000.0)}
    head_dim = config["head_dim"]
    turned = numbers.count("rope.dimension_count", head_dim)
    if turned != head_dim:
        if not partial or turned % 2 or not 0 < turned < head_dim:
            raise CheckpointError(
                f"{gguf.path}: rope turns {turned} of {head_dim} dimensions, "
                f"which {numbers.prefix} models cannot express"
            )
        found["partial_rotary_factor"] = turned / head_dim
    scalings = [
        scaling
        for scaling in (
            _scaling(gguf, numbers),
            _llama3(gguf, numbers, turned // 2, found["rope_theta"]),
            _longrope(gguf, numbers, turned // 2, config),
        )
        if scaling
    ]
    if len(scalings) > 1:
        names = " and ".join(str(scaling["rope_type"]) for scaling in scalings)
        raise CheckpointError(f"{gguf.path}: its positions are scaled twice, by {names}")
    for scaling in scalings:
        if scaling["rope_type"] == "longrope":  # phi3 keeps this one outside
            key = "original_max_position_embeddings"
            found[key] = scaling.pop(key)
        found["rope_scaling"] = scaling
    return found


def _scaling(gguf: GGUF, numbers: Numbers) -> Json | None:
    kind = gguf.metadata.get(f"{numbers.prefix}.rope.scaling.type")
    linear = numbers.number("rope.scale_linear", 1.0)  # the name before rope.scaling existed
    if kind is None and linear not in (0.0, 1.0):
        return {"rope_type": "linear", "factor": linear}
    if kind in (None, "none"):
        return None
    if kind == "longrope" and "rope_factors_long.weight" in gguf.tensors:
        return None  # its numbers are in tensors
    factor = numbers.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind != "yarn":
        raise CheckpointError(f"{gguf.path}: unknown rope scaling type {kind!r}")
    scaling: Json = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": numbers.count("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if f"{numbers.prefix}.rope.scaling.yarn_{name}" in gguf.metadata:
            scaling[name] = numbers.number(f"rope.scaling.yarn_{name}")
    magnitude = numbers.number("rope.scaling.attn_factor", 1.0)
    if magnitude != 1.0 and factor > 0:
        scaling["attention_factor"] = magnitude * (0.1 * math.log(factor) + 1.0)
    return scaling


def _factors(gguf: GGUF, name: str, pairs: int) -> npt.NDArray[np.float32] | None:
    """What the frequencies of a head's pairs are divided by (pairs,), from a tensor."""
    info = gguf.tensors.get(name)
    if info is None:
        return None
    if info.type != "F32" or info.shape != (pairs,):
        raise CheckpointError(f"{gguf.path}: tensor {name} does not fit {pairs} frequencies")
    return dequantize("F32", gguf.rows(name))[:, 0]


def _llama3(gguf: GGUF, numbers: Numbers, pairs: int, theta: float) -> Json | None:
    """The parameters behind a table of factors, if they are Llama 3's."""
    factors = _factors(gguf, "rope_freqs.weight", pairs)
    if factors is None or (factors == 1).all():
        return None
    original = numbers.count("rope.scaling.original_context_length", 8192)
    factor = float(factors.max())
    if not np.allclose(factors, llama3_factors(pairs, theta, factor, original), rtol=1e-4):
        raise CheckpointError(f"{gguf.path}: rope_freqs.weight is not Llama 3's scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


def llama3_factors(
    pairs: int, theta: float, factor: float, original: int
) -> npt.NDArray[np.float64]:
    """What Llama 3 divides each of the frequencies theta**(-i/pairs) by (pairs,).

    Wavelengths under original/4 stay, those over original/1 are divided by `factor`, and in
    between the inverse runs linearly in original/wavelength.
    """
    wavelength = 2 * math.pi * theta ** (np.arange(pairs) / pairs)
    smooth = np.clip((original / wavelength - 1) / 3, 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _longrope(gguf: GGUF, numbers: Numbers, pairs: int, config: Json) -> Json | None:
    long = _factors(gguf, "rope_factors_long.weight", pairs)
    short = _factors(gguf, "rope_factors_short.weight", pairs)
    if long is None and short is None:
        return None
    if long is None or short is None:
        raise CheckpointError(f"{gguf.path}: has only one of rope_factors_long and _short")
    original = numbers.count("rope.scaling.original_context_length")
    stretch = config["max_position_embeddings"] / max(original, 2)
    default = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    magnitude = numbers.number("rope.scaling.attn_factor", default)
    scaling: Json = {
        "rope_type": "longrope",
        "type": "longrope",  # the key that phi3's own files and their readers use
        "short_factor": [float(str(f)) for f in short],
        "long_factor": [float(str(f)) for f in long],
        "original_max_position_embeddings": original,
    }
    if abs(magnitude - default) > 1e-5:
        scaling["attention_factor"] = magnitude
    return scaling
