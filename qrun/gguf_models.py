"""From a GGUF's architecture to a Hugging Face one: config.json, tensor names, row orders.

What cannot be carried over is refused by name, so that no file converts into a different model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qrun.errors import CheckpointError
from qrun.gguf import GGUF, open_gguf
from qrun.gguf_rope import rope_config
from qrun.gguf_tokenizer import tokenizer_files
from qrun.source import Source, SourceTensor, sixteen_bit_type

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
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Architecture:
    model_type: str
    class_name: str
    blocks: dict[str, str]  # GGUF's name within a block -> the module's
    interleaved: bool = False  # q and k rows lie pair by pair, not half by half
    folded_norms: bool = False  # norms hold 1 + w
    biases: tuple[str, ...] = ()  # modules that must have a bias
    optional_biases: tuple[str, ...] = ()
    activation: str = "silu"
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        _PLAIN,
        interleaved=True,
        optional_biases=("attn_q", "attn_k", "attn_v", "attn_output", *_MLP),
    ),
}


def read_gguf(path: Path) -> Source:
    gguf = open_gguf(path)
    return _Reader(gguf).source()


class _Reader:
    def __init__(self, gguf: GGUF) -> None:
        self.gguf = gguf
        self.path = gguf.path
        name = gguf.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: unknown architecture {name!r}",
                hint=f"qrun converts GGUF files of: {', '.join(ARCHITECTURES)}",
            )
        self.prefix: str = name
        self.arch = ARCHITECTURES[name]
        if gguf.metadata.get("split.count", 0) not in (0, 1):
            raise CheckpointError(
                f"{self.path}: one part of a split GGUF",
                hint="merge the parts first, with `llama-gguf-split --merge`",
            )

    def source(self) -> Source:
        config = self.config()
        names = self.names(config)
        self.check_complete(names)
        self.check_shapes(names, config)
        tensors = [self.tensor(old, new, config) for old, new in names.items()]
        texts, special_ids = tokenizer_files(
            self.path, self.gguf.metadata, config["max_position_embeddings"]
        )
        config |= special_ids
        dtype = sixteen_bit_type(self.arch.model_type, None, tensors)
        return Source("gguf", self.path, config, tensors, dtype, texts=texts)

    # ---- config.json

    def number(self, key: str, default: float | None = None) -> float:
        """A number of this architecture; one a layer is fine where all are equal."""
        value = self.gguf.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None:
            raise CheckpointError(f"{self.path}: metadata {self.prefix}.{key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(
                f"{self.path}: metadata {self.prefix}.{key} is not one number for all layers"
            )
        # a float32 such as 9.999999747378752e-06 is written as the 1e-05 that it came from
        return float(str(np.float32(value)))

    def count(self, key: str, default: int | None = None) -> int:
        value = self.gguf.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value  # number() would round it to float32
        number = self.number(key, default)
        if number < 0 or number != int(number):
            raise CheckpointError(f"{self.path}: metadata {self.prefix}.{key} is {number}")
        return int(number)

    def config(self) -> dict[str, Any]:
        if self.count("expert_count", 0):
            raise CheckpointError(f"{self.path}: a mixture of experts, which is not converted")
        hidden = self.count("embedding_length")
        heads = self.count("attention.head_count")
        kv_heads = self.count("attention.head_count_kv", heads)
        layers = self.count("block_count")
        head_dim = self.count("attention.key_length", hidden // max(heads, 1))
        if (
            min(hidden, heads, kv_heads, layers, head_dim) < 1
            or heads % kv_heads
            or head_dim % 2
            or layers > len(self.gguf.tensors)
        ):
            raise CheckpointError(
                f"{self.path}: no model has {layers} layers, {heads} heads of {head_dim} on "
                f"{kv_heads}, and {len(self.gguf.tensors)} tensors"
            )
        if self.count("attention.value_length", head_dim) != head_dim:
            raise CheckpointError(f"{self.path}: keys and values of different lengths")
        arch, tensors = self.arch, self.gguf.tensors
        config: dict[str, Any] = {
            "architectures": [arch.class_name],
            "model_type": arch.model_type,
            "hidden_size": hidden,
            "intermediate_size": self.count("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_act": arch.activation,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self.count("context_length"),
            "vocab_size": self.embedding_rows(),
            "tie_word_embeddings": "output.weight" not in tensors,
        }
        if arch.optional_biases:
            config["attention_bias"] = "blk.0.attn_q.bias" in tensors
            config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
        return (
            config
            | arch.extra
            | rope_config(self.gguf, self.prefix, head_dim, self.number, self.count)
        )

    def embedding_rows(self) -> int:
        if "token_embd.weight" not in self.gguf.tensors:
            raise CheckpointError(f"{self.path}: tensor token_embd.weight is missing")
        return self.gguf.tensors["token_embd.weight"].shape[0]

    # ---- tensors

    def names(self, config: dict[str, Any]) -> dict[str, str]:
        """GGUF name -> final name of every tensor in the file that is one of the model's."""
        outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
        outer["output"] = "lm_head"
        names: dict[str, str] = {}
        for name in self.gguf.tensors:
            if name in _ROPE_TENSORS:
                continue  # read by rope_config
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

    def check_complete(self, names: dict[str, str]) -> None:
        layers = self.count("block_count")
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
            shape = expected[re.sub(r"^model\.layers\.\d+\.", "", module)]
            if leaf == "bias":
                shape = shape[:1]
            if self.gguf.tensors[old].shape != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {old} has shape {self.gguf.tensors[old].shape}, "
                    f"the metadata make it {shape}"
                )


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
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        shapes[f"{norm}_layernorm"] = (hidden,)
    return shapes
