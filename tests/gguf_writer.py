"""A small GGUF writer, and a reference dequantization in float64, element by element."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qrun.gguf import TYPES

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

TYPE_IDS = {name: i for i, (name, _, _) in TYPES.items()}
BLOCKS = {name: (block, size) for name, block, size in TYPES.values()}


class F32(float):
    """A metadata value to be stored as float32 (a plain float becomes one too)."""


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """The type's number and the value itself."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if value >= 0 else struct.pack("<Ii", 5, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    kind = gguf_value(value[0])[:4]
    items = b"".join(gguf_value(v)[4:] for v in value)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + items


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    *,
    alignment: int = 32,
) -> Path:
    """`tensors`: name -> (type, shape with the slowest axis first, raw bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += gguf_string(key) + gguf_value(value)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        out += gguf_string(name) + struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", TYPE_IDS[kind], len(data))
        data += raw + bytes(-len(raw) % alignment)
    out += bytes(-len(out) % alignment)
    path.write_bytes(out + data)
    return path


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> bytes:
    """Random bits in every field, with scales that are small float16 numbers of either sign."""
    block, size = BLOCKS[kind]
    count = int(np.prod(shape)) // block
    if kind == "F32":
        return rng.normal(size=count).astype("<f4").tobytes()
    if kind == "F16":
        return rng.normal(size=count).astype("<f2").tobytes()
    if kind == "BF16":
        return (rng.normal(size=count).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
    halves |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108]}
    halves |= {"IQ4_NL": [0], "IQ4_XS": [0], "IQ3_S": [0], "IQ2_XS": [0]}
    for at in halves[kind]:
        d = rng.normal(scale=0.02, size=count).astype("<f2")
        raw[:, at : at + 2] = d.view(np.uint8).reshape(-1, 2)
    return raw.tobytes()


def reference(kind: str, raw: bytes) -> Floats:
    """Float64 values of raw blocks, as ggml's description of each block reads."""
    _, size = BLOCKS[kind]
    if kind in ("F32", "F16"):
        return np.frombuffer(raw, "<f4" if kind == "F32" else "<f2").astype(np.float64)
    if kind == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    values: list[float] = []
    for at in range(0, len(raw), size):
        values += _BLOCK_READERS[kind](raw[at : at + size])
    return np.array(values)


def half(raw: bytes) -> float:
    return struct.unpack("<e", raw)[0]


def _q4(raw: bytes) -> list[int]:
    return [raw[i] & 15 for i in range(16)] + [raw[i] >> 4 for i in range(16)]


def _fifth(raw: bytes) -> list[int]:
    (word,) = struct.unpack("<I", raw)
    return [word >> i & 1 for i in range(32)]


def _q4_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (q - 8) for q in _q4(b[2:])]


def _q4_1(b: bytes) -> list[float]:
    return [half(b[:2]) * q + half(b[2:4]) for q in _q4(b[4:])]


def _q5_0(b: bytes) -> list[float]:
    high = _fifth(b[2:6])
    return [half(b[:2]) * (q + 16 * h - 16) for q, h in zip(_q4(b[6:]), high, strict=True)]


def _q5_1(b: bytes) -> list[float]:
    high = _fifth(b[4:8])
    return [
        half(b[:2]) * (q + 16 * h) + half(b[2:4]) for q, h in zip(_q4(b[8:]), high, strict=True)
    ]


def _q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * q for q in struct.unpack("<32b", b[2:])]


def _scale_min(j: int, s: bytes) -> tuple[int, int]:
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4


def _k45(b: bytes, qh: bytes | None, qs: bytes) -> list[float]:
    d, dmin = half(b[:2]), half(b[2:4])
    values: list[float] = []
    for group in range(8):
        s, m = _scale_min(group, b[4:16])
        for i in range(32):
            q = qs[group // 2 * 32 + i] >> 4 * (group % 2) & 15
            if qh is not None:
                q += 16 * (qh[i] >> group & 1)
            values.append(d * s * q - dmin * m)
    return values


def _q4_k(b: bytes) -> list[float]:
    return _k45(b, None, b[16:])


def _q5_k(b: bytes) -> list[float]:
    return _k45(b, b[16:48], b[48:])


def _q6_k(b: bytes) -> list[float]:
    ql, qh, scales, d = b[:128], b[128:192], struct.unpack("<16b", b[192:208]), half(b[208:])
    values = [0.0] * 256
    for n in (0, 1):
        for i in range(32):
            low, high = ql[64 * n :], qh[32 * n + i]
            q = [low[i] & 15, low[i + 32] & 15, low[i] >> 4, low[i + 32] >> 4]
            for part in range(4):
                code = (q[part] | (high >> 2 * part & 3) << 4) - 32
                scale = scales[8 * n + i // 16 + 2 * part]
                values[128 * n + 32 * part + i] = d * scale * code
    return values


_BLOCK_READERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def bytes_to_characters() -> list[str]:
    """GPT-2's visible character for each byte, in tokenizer files' usual order of ids."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in plain}
    for i, b in enumerate(b for b in range(256) if b not in table):
        table[b] = chr(256 + i)
    return [table[b] for b in range(256)]


def tiny_tokenizer() -> dict[str, Any]:
    """Metadata of a byte-level tokenizer: three control tokens, all bytes, a few merges."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_characters()]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
    tokens += [m.replace(" ", "") for m in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>",
    }


def tiny_gguf(
    rng: np.random.Generator,
    kind: str = "Q4_0",
    *,
    arch: str = "llama",
    hidden: int = 64,
    inner: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    tied: bool = True,
    biases: bool = False,
    experts: int = 0,
) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Metadata and tensors of a small model, its matrices of the given type."""
    metadata = tiny_tokenizer()
    vocab = len(metadata["tokenizer.ggml.tokens"])
    numbers = {
        "block_count": layers,
        "context_length": 128,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    head_dim = hidden // heads
    experts = experts or 4 * (arch == "qwen3moe")
    if experts:
        numbers |= {"expert_count": experts, "expert_used_count": 2}
    if arch == "qwen3moe":
        numbers["expert_feed_forward_length"] = 32
    if arch in ("qwen3", "qwen3moe", "gemma3"):
        head_dim = 32  # not hidden / heads
        numbers |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if arch in ("gemma3", "phi3"):
        numbers["attention.sliding_window"] = 16
    metadata["general.architecture"] = arch
    metadata |= {f"{arch}.{key}": value for key, value in numbers.items()}
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}

    def add(name: str, *shape: int) -> None:
        stored = kind if len(shape) > 1 else "F32"
        tensors[name] = (stored, shape, random_blocks(stored, shape, rng))

    q, kv = heads * head_dim, kv_heads * head_dim
    matrices: dict[str, tuple[int, ...]]
    matrices = {"attn_output": (hidden, q), "ffn_down": (hidden, inner)}
    if arch == "phi3":
        matrices |= {"attn_qkv": (q + 2 * kv, hidden), "ffn_up": (2 * inner, hidden)}
    else:
        matrices |= {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
        matrices |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}
    if experts:
        width = 32 if arch == "qwen3moe" else inner
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            del matrices[name]
        matrices["ffn_gate_exps"] = matrices["ffn_up_exps"] = (experts, width, hidden)
        matrices["ffn_down_exps"] = (experts, hidden, width)
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if arch == "gemma3":
        norms |= {"post_attention_norm": hidden, "post_ffw_norm": hidden}
    if arch in ("gemma3", "qwen3", "qwen3moe"):
        norms |= {"attn_q_norm": head_dim, "attn_k_norm": head_dim}
    with_bias = set(matrices) if biases else set()
    if arch == "qwen2":
        with_bias = {"attn_q", "attn_k", "attn_v"}
    add("token_embd.weight", vocab, hidden)
    for i in range(layers):
        for name, shape in matrices.items():
            add(f"blk.{i}.{name}.weight", *shape)
            if name in with_bias:
                add(f"blk.{i}.{name}.bias", shape[0])
        if experts:
            router = (experts, hidden)
            raw = random_blocks("F32", router, rng)
            tensors[f"blk.{i}.ffn_gate_inp.weight"] = ("F32", router, raw)
        for name, n in norms.items():
            add(f"blk.{i}.{name}.weight", n)
    add("output_norm.weight", hidden)
    if not tied:
        add("output.weight", vocab, hidden)
    return metadata, tensors
