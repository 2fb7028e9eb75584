"""From a GGUF's architecture to a Hugging Face one: config.json, tensor names, row orders.

What cannot be carried over is refused by name, so that no file converts into a different model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qrun import gguf_config
from qrun.errors import CheckpointError
from qrun.gguf import GGUF, open_parts
from qrun.gguf_tokenizer import tokenizer_files
from qrun.source import (
    FLOATS,
    Source,
    SourceTensor,
    natural,
    sixteen_bit_type,
    stack_experts,
)

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PLAIN = _ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROUTED = {
    "ffn_gate_inp": "gate",
    "ffn_gate_exps": "switch_mlp.gate_proj",
    "ffn_up_exps": "switch_mlp.up_proj",
    "ffn_down_exps": "switch_mlp.down_proj",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Architecture:
    model_type: str
    class_name: str
    extras: Callable[[GGUF, gguf_config.Numbers, dict[str, Any]], dict[str, Any]]
    blocks: dict[str, str]  # GGUF's name within a block -> the module's
    interleaved: bool = False  # q and k rows lie pair by pair, not half by half
    folded_norms: bool = False  # norms hold 1 + w
    partial_rotary: bool = False
    biases: tuple[str, ...] = ()  # modules that must have a bias
    optional_biases: tuple[str, ...] = ()


ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        gguf_config.llama,
        _PLAIN,
        interleaved=True,
        optional_biases=("attn_q", "attn_k", "attn_v", "attn_output", *_MLP),
    ),
    "qwen2": Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        gguf_config.qwen2,
        _PLAIN,
        biases=("attn_q", "attn_k", "attn_v"),
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", gguf_config.qwen3, _PLAIN | _HEAD_NORMS),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        gguf_config.qwen3_moe,
        _ATTENTION
        | _HEAD_NORMS
        | {"ffn_norm": "post_attention_layernorm"}
        | {old: f"mlp.{new}" for old, new in _ROUTED.items()},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        gguf_config.gemma3,
        _ATTENTION | _MLP | _HEAD_NORMS | _FOUR_NORMS,
        folded_norms=True,
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", gguf_config.phi3, _FUSED, partial_rotary=True),
}


# A "llama" with experts.
MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    gguf_config.mixtral,
    _ATTENTION
    | {"ffn_norm": "post_attention_layernorm"}
    | {old: f"block_sparse_moe.{new}" for old, new in _ROUTED.items()},
    interleaved=True,
)


def read_gguf(path: Path) -> Source:
    return _Reader(open_parts(path)).source()


class _Reader:
    def __init__(self, gguf: GGUF) -> None:
        self.gguf, self.path = gguf, gguf.path
        name = gguf.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: unknown architecture {name!r}",
                hint=f"qrun converts GGUF files of: {', '.join(ARCHITECTURES)}",
            )
        self.arch = ARCHITECTURES[name]
        self.numbers = gguf_config.Numbers(gguf, name)
        if self.numbers.count("expert_count", 0):
            if name == "llama":
                self.arch = MIXTRAL
            if "ffn_gate_inp" not in self.arch.blocks:
                raise CheckpointError(
                    f"{self.path}: a mixture of experts, which is not converted for {name}"
                )
            if "blk.0.ffn_gate.0.weight" in gguf.tensors:
                self.arch = one_by_one(self.arch, self.numbers.count("expert_count"), gguf)

    def source(self) -> Source:
        gguf, arch = self.gguf, self.arch
        config: dict[str, Any] = {
            "architectures": [arch.class_name],
            "model_type": arch.model_type,
        }
        config |= gguf_config.sizes(gguf, self.numbers)
        config |= arch.extras(gguf, self.numbers, config)
        config |= gguf_config.rope(gguf, self.numbers, config, partial=arch.partial_rotary)
        names = self.names(config)
        self.check_complete(names, config["num_hidden_layers"])
        self.check_shapes(names, config)
        order = sorted(names, key=natural)  # experts one by one are stacked in their order
        tensors = [self.tensor(old, names[old], config) for old in order]
        tensors = stack_experts(self.path, tensors)
        context = config["max_position_embeddings"]
        texts, special_ids = tokenizer_files(self.path, gguf.metadata, context)
        dtype = sixteen_bit_type(arch.model_type, None, tensors)
        return Source("gguf", self.path, config | special_ids, tensors, dtype, texts=texts)

    def names(self, config: dict[str, Any]) -> dict[str, str]:
        """GGUF name -> final name of every tensor in the file that is one of the model's."""
        outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
        outer["output"] = "lm_head"
        names: dict[str, str] = {}
        for name in self.gguf.tensors:
            if name in _ROPE_TENSORS:
                continue  # read by gguf_config.rope
            stem, _, leaf = name.rpartition(".")
            block = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
            new = None
            if block and int(block[1]) < config["num_hidden_layers"]:
                inner = self.arch.blocks.get(block[2])
                if leaf == "weight" or block[2] in self.arch.biases + self.arch.optional_biases:
                    new = inner and f"model.layers.{block[1]}.{inner}"
            elif leaf == "weight":
                new = outer.get(stem)
            if not new or leaf not in ("weight", "bias"):
                raise CheckpointError(
                    f"{self.path}: tensor {name} has no place in a {self.arch.model_type} model"
                )
            names[name] = f"{new}.{leaf}"
        return names

    def check_complete(self, names: dict[str, str], layers: int) -> None:
        first = {n.split(".", 2)[2] for n in names if n.startswith("blk.0.")}
        wanted = {f"{inner}.weight" for inner in self.arch.blocks}
        wanted |= {f"{inner}.bias" for inner in self.arch.biases}
        wanted |= first  # what one layer has, all have
        if any(n.startswith("attn") and n.endswith(".bias") for n in first):
            wanted |= {f"{n}.bias" for n in self.arch.optional_biases if n.startswith("attn")}
        required = {"token_embd.weight", "output_norm.weight"}
        required |= {f"blk.{i}.{n}" for i in range(layers) for n in wanted}
        missing = sorted(required - names.keys())
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{self.path}: tensor {missing[0]}{more} missing")

    def tensor(self, old: str, new: str, config: dict[str, Any]) -> SourceTensor:
        info, raw = self.gguf.tensors[old], self.gguf.rows(old)
        add = -1.0 if self.arch.folded_norms and "norm" in old else 0.0
        role = old.split(".")[-2]
        if self.arch.interleaved and role in ("attn_q", "attn_k"):
            order = half_split_order(raw.shape[0], config["head_dim"])
            return SourceTensor(new, info.shape, info.type, lambda i, j: raw[order[i:j]], add)
        return SourceTensor(new, info.shape, info.type, lambda i, j: raw[i:j], add)

    def check_shapes(self, names: dict[str, str], config: dict[str, Any]) -> None:
        expected = expected_shapes(config)
        for old, new in names.items():
            module, _, leaf = new.rpartition(".")
            inner = re.sub(r"^model\.layers\.\d+\.", "", module)
            stack = re.sub(r"\bexperts\.\d+\.", "switch_mlp.", inner)
            shape = expected[stack] if stack == inner else expected[stack][1:]
            if leaf == "bias":
                shape = shape[:1]
            if len(shape) == 1 and self.gguf.tensors[old].type not in FLOATS:
                raise CheckpointError(f"{self.path}: vector {old} is stored in blocks")
            if self.gguf.tensors[old].shape != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {old} has shape {self.gguf.tensors[old].shape}, "
                    f"the metadata make it {shape}"
                )


def one_by_one(arch: Architecture, count: int, gguf: GGUF) -> Architecture:
    """The same with a tensor an expert (ffn_gate.0, ...), as files before April 2024 have it."""
    if count > len(gguf.tensors):
        raise CheckpointError(f"{gguf.path}: {count} experts, but {len(gguf.tensors)} tensors")
    blocks = {old: new for old, new in arch.blocks.items() if not old.endswith("_exps")}
    for old, new in arch.blocks.items() - blocks.items():
        for e in range(count):
            name = f"{old.removesuffix('_exps')}.{e}"
            blocks[name] = new.replace(".switch_mlp.", f".experts.{e}.")
    return replace(arch, blocks=blocks)


def half_split_order(rows: int, head_dim: int) -> npt.NDArray[np.intp]:
    """For each row (in halves) of q or k, the row of a GGUF (in pairs) that holds it.

    GGUF's llama files rotate elements 2i and 2i+1 of a head together, Hugging Face's i and i+D/2:
    row i+j*D/2 of a head is their row 2i+j.
    """
    pairs = np.arange(rows).reshape(-1, head_dim // 2, 2)
    return pairs.transpose(0, 2, 1).reshape(-1)


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weight's shape of every module, by its name within a block."""
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    d = config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
        "model.norm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.qkv_proj": (q + 2 * kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.gate_up_proj": (2 * inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    experts = config.get("num_experts", config.get("num_local_experts", 0))
    width = config.get("moe_intermediate_size", inner)
    for mixture in ("mlp", "block_sparse_moe"):
        shapes |= {
            f"{mixture}.gate": (experts, hidden),
            f"{mixture}.switch_mlp.gate_proj": (experts, width, hidden),
            f"{mixture}.switch_mlp.up_proj": (experts, width, hidden),
            f"{mixture}.switch_mlp.down_proj": (experts, hidden, width),
        }
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        shapes[f"{norm}_layernorm"] = (hidden,)
    return shapes
