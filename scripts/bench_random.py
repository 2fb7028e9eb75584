"""Whole-model speed with random 4-bit weights of real shapes: no download, any size that fits.

Usage: python scripts/bench_random.py [llama-8b llama-1b qwen3-0.6b ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from qrun.bench import bench_model
from qrun.checkpoint import Tensor
from qrun.config import Config
from qrun.declared import Declared
from qrun.loader import LoadedModel, model_file
from qrun.report import table
from qrun.weights import Weights

GROUP = 64


def shape(
    kind: str, k: int, n: int, layers: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """A config.json of the usual keys."""
    return {
        "model_type": kind,
        "hidden_size": k,
        "intermediate_size": n,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": more.pop("head_dim", k // heads),
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "quantization": {"bits": 4, "group_size": GROUP},
        **more,
    }


MODELS = {
    "llama-8b": shape("llama", 4096, 14336, 32, 32, 8, 128256),
    "llama-1b": shape("llama", 2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
    "qwen3-0.6b": shape(
        "qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True
    ),
    "smollm2-135m": shape("llama", 576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
}


class RandomSource:
    """Tensors of a llama or qwen3 checkpoint whose values are drawn when they are read."""

    def __init__(self, c: dict[str, Any]) -> None:
        self.tensors: dict[str, Tensor] = {}
        k, n, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
        self._matrix("model.embed_tokens", c["vocab_size"], k)
        if not c.get("tie_word_embeddings"):
            self._matrix("lm_head", c["vocab_size"], k)
        self._tensor("model.norm.weight", "BF16", (k,))
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}"
            for name, rows, columns in (
                ("self_attn.q_proj", q, k),
                ("self_attn.k_proj", kv, k),
                ("self_attn.v_proj", kv, k),
                ("self_attn.o_proj", k, q),
                ("mlp.gate_proj", n, k),
                ("mlp.up_proj", n, k),
                ("mlp.down_proj", k, n),
            ):
                self._matrix(f"{at}.{name}", rows, columns)
            self._tensor(f"{at}.input_layernorm.weight", "BF16", (k,))
            self._tensor(f"{at}.post_attention_layernorm.weight", "BF16", (k,))
            if c["model_type"] == "qwen3":
                self._tensor(f"{at}.self_attn.q_norm.weight", "BF16", (d,))
                self._tensor(f"{at}.self_attn.k_norm.weight", "BF16", (d,))

    def _matrix(self, name: str, n: int, k: int) -> None:
        self._tensor(f"{name}.weight", "U32", (n, k // 8))
        self._tensor(f"{name}.scales", "BF16", (n, k // GROUP))
        self._tensor(f"{name}.biases", "BF16", (n, k // GROUP))

    def _tensor(self, name: str, dtype: str, dims: tuple[int, ...]) -> None:
        size = 4 if dtype == "U32" else 2
        for dim in dims:
            size *= dim
        self.tensors[name] = Tensor(Path(name), dtype, dims, 0, size)

    def read(self, name: str) -> mx.array:
        """Codes of all values; scales and biases that keep activations near one."""
        dims = self.tensors[name].shape
        if name.endswith("norm.weight"):
            return mx.ones(dims, mx.bfloat16)
        if name.endswith(".weight"):
            return mx.random.randint(0, 1 << 31, dims).astype(mx.uint32) * 2
        if name.endswith(".biases"):
            return mx.full(dims, -0.0375, mx.bfloat16)
        return mx.full(dims, 0.005, mx.bfloat16)

    def release(self) -> None:
        """Nothing is held."""


def build(name: str, dtype: mx.Dtype) -> LoadedModel:
    """A model of these shapes, without a tokenizer."""
    values = MODELS[name]
    config = Config(values, name)
    source = RandomSource(values)
    weights = Weights(source, Declared(config), dtype)
    model = model_file(values["model_type"], name).Model(config, weights)
    weights.finish(name)
    tokenizer: Any = None
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        vocab=values["vocab_size"],
        folder=Path(name),
        dtype=dtype,
        context=values["max_position_embeddings"],
        eos=frozenset(),
        step_bytes=weights.step_bytes,
        load_seconds=0.0,
    )


def main() -> None:
    """Bench each model named on the command line."""
    dtype = mx.float32 if mx.default_device().type == mx.cpu else mx.bfloat16
    for name in sys.argv[1:] or ["qwen3-0.6b"]:
        model = build(name, dtype)
        rows = bench_model(model, rounds=5, prefills=(512, 2048), contexts=(512,))
        print(f"\n{name}, {model.step_bytes / 1e9:.2f} GB a step\n{table(rows)}", flush=True)
        del model


if __name__ == "__main__":
    main()
