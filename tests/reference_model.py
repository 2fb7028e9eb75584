"""llama, qwen2 and qwen3 in float64 numpy, from the checkpoint folder alone.

Slow, plain and independent: it shares no line with qrun, reads the files itself, keeps no cache,
and every token sees the whole text anew. What it says is what a checkpoint means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class ReferenceModel:
    """logits(ids) of a checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.raw: dict[str, npt.NDArray[Any]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self.raw |= read_safetensors(path)

    def __getitem__(self, name: str) -> Array:
        """The values of a weight, dequantized if it comes with scales."""
        path = name.removesuffix(".weight")
        if f"{path}.scales" not in self.raw:
            return self.raw[name].astype(np.float64)
        scales, biases = self.raw[f"{path}.scales"], self.raw[f"{path}.biases"]
        return dequantize(self.raw[name], scales, biases, self.width(name))

    def width(self, name: str) -> int:
        """The inputs of a linear layer, from the architecture."""
        c = self.config
        if "o_proj" in name:
            return c["num_attention_heads"] * self.head_dim
        return c["intermediate_size"] if "down_proj" in name else c["hidden_size"]

    @property
    def head_dim(self) -> int:
        c = self.config
        return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]

    def logits(self, ids: Sequence[int]) -> Array:
        """ids (L,) -> logits (L, V) behind each of them."""
        c = self.config
        eps = c["rms_norm_eps"]
        x = self["model.embed_tokens.weight"][list(ids)]
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            x = x + self.attention(
                at + "self_attn.", norm(x, self[at + "input_layernorm.weight"], eps)
            )
            h = norm(x, self[at + "post_attention_layernorm.weight"], eps)
            gate = self.linear(at + "mlp.gate_proj", h)
            up = self.linear(at + "mlp.up_proj", h)
            x = x + self.linear(at + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        x = norm(x, self["model.norm.weight"], eps)
        head = "model.embed_tokens" if c.get("tie_word_embeddings") else "lm_head"
        return x @ self[f"{head}.weight"].T

    def linear(self, path: str, x: Array) -> Array:
        y = x @ self[f"{path}.weight"].T
        return y + self[f"{path}.bias"] if f"{path}.bias" in self.raw else y

    def attention(self, at: str, x: Array) -> Array:
        c, d, length = self.config, self.head_dim, len(x)
        heads, kv_heads = c["num_attention_heads"], c.get("num_key_value_heads")
        kv_heads = kv_heads or heads
        q = self.linear(at + "q_proj", x).reshape(length, heads, d)
        k = self.linear(at + "k_proj", x).reshape(length, kv_heads, d)
        v = self.linear(at + "v_proj", x).reshape(length, kv_heads, d)
        if f"{at}q_norm.weight" in self.raw:
            q = norm(q, self[at + "q_norm.weight"], c["rms_norm_eps"])
            k = norm(k, self[at + "k_norm.weight"], c["rms_norm_eps"])
        angle = np.arange(length)[:, None] * inverse_frequencies(c, d)
        q, k = rotate(q, angle), rotate(k, angle)
        out = np.empty((length, heads, d))
        hidden = np.triu(np.full((length, length), -np.inf), 1)
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = q[:, h] @ k[:, g].T / math.sqrt(d) + hidden
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, g]
        return self.linear(at + "o_proj", out.reshape(length, heads * d))


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * weight


def rotate(x: Array, angle: Array) -> Array:
    """x (L, H, D) by angle (L, D/2); dim i is paired with dim i + D/2."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * angle)[:, None, :]
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], -1)


def inverse_frequencies(c: dict[str, Any], d: int) -> Array:
    """Radians a position for each pair: default, linear and llama3, old style and new."""
    rule = c.get("rope_parameters") or c.get("rope_scaling") or {}
    theta = rule.get("rope_theta", c.get("rope_theta", 10000.0))
    frequency = np.array([theta ** (-2 * i / d) for i in range(d // 2)])
    kind = rule.get("rope_type", rule.get("type", "default"))
    if kind == "linear":
        return frequency / rule["factor"]
    if kind == "llama3":
        low, high = rule["low_freq_factor"], rule["high_freq_factor"]
        original, factor = rule["original_max_position_embeddings"], rule["factor"]
        scaled = []
        for f in frequency:
            wavelength = 2 * math.pi / f
            if wavelength < original / high:
                scaled.append(f)
            elif wavelength > original / low:
                scaled.append(f / factor)
            else:
                smooth = (original / wavelength - low) / (high - low)
                scaled.append((1 - smooth) * f / factor + smooth * f)
        return np.array(scaled)
    assert kind == "default", kind
    return frequency


def dequantize(
    w: npt.NDArray[np.uint32], scales: npt.NDArray[Any], biases: npt.NDArray[Any], k: int
) -> Array:
    """Affine w (N, words) of k columns: scale * q + bias, q read as a bit stream per row."""
    n, bits, group = len(w), w.shape[1] * 32 // k, k // scales.shape[1]
    # Code i lies at bit i * bits of its row, perhaps across two words: take both as one of 64 bits.
    word, shift = np.divmod(np.arange(k) * bits, 32)
    wide = np.pad(w, ((0, 0), (0, 1))).astype(np.uint64)
    both = wide[:, word] | wide[:, word + 1] << np.uint64(32)
    q = (both >> shift.astype(np.uint64) & np.uint64(2**bits - 1)).astype(np.float64)
    grouped = q.reshape(n, -1, group)
    values = grouped * scales.astype(np.float64)[..., None] + biases.astype(np.float64)[..., None]
    return values.reshape(n, k)


def read_safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All tensors of a file; BF16 as float32."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    types = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4", "U8": "u1"}
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        array = np.frombuffer(data[start + first : start + last], types[entry["dtype"]])
        if entry["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = array.reshape(entry["shape"])
    return tensors
