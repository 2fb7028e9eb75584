"""Tiny random checkpoints, as they come from the hub: config, weights, tokenizer, chat template.

Everything is written from scratch with numpy and `tokenizers`, sharing no code with qrun. Matrices
are born quantized (random codes, scales of both signs), so a folder is the truth by definition.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

VOCAB = 352  # wider than both tokenizers below: real checkpoints are padded, too
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# One token whose text is beyond ASCII: decoding must not send it through the alphabet of bytes.
ADDED = "<｜größe｜>"

Stored = tuple[str, npt.NDArray[Any]]  # safetensors type name (BF16 kept as uint16), values


def tiny(
    folder: Path,
    arch: str = "llama",
    *,
    bits: int = 4,
    group_size: int = 32,
    mode: str = "affine",
    dtype: str = "F16",
    shards: int = 1,
    tied: bool = True,
    dense: Sequence[str] = (),
    layers: Mapping[str, Mapping[str, Any]] | None = None,
    tokenizer: str = "bytelevel",
    template: str | None = CHATML,
    template_form: str = "string",
    eos_in: Sequence[str] = ("config", "generation_config", "tokenizer"),
    eos: int | None = None,
    config: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, Stored]], None] | None = None,
    seed: int = 0,
) -> Path:
    """Write a checkpoint of 2 layers into `folder` (made if missing) and return it.

    arch: a key of ARCHITECTURES. bits, group_size, mode: of every matrix except those whose path
    contains an entry of `dense`; `layers`: module path -> another {bits, group_size, mode}, also
    written to config.json. dtype: F16, BF16 or F32, of scales, norms and dense tensors. shards: 1
    is model.safetensors, more come with an index. tied: no lm_head. tokenizer: "bytelevel" or
    "sentencepiece". template_form: "string", "list", "jinja". eos_in: the files that name `eos`
    (default: <|im_end|>). config: changes to config.json, None removes a key. edit: changes the
    tensors before they are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = base_config(arch) | {"tie_word_embeddings": tied}
    for key, value in (config or {}).items():
        settings[key] = value
    spec = {"group_size": group_size, "bits": bits} | ({} if mode == "affine" else {"mode": mode})
    if bits:
        settings.setdefault("quantization", {**spec, **(layers or {})})
    rng = np.random.default_rng(seed)
    tensors: dict[str, Stored] = {}
    for name, shape, kind in ARCHITECTURES[arch](settings):
        path = name.removesuffix(".weight")
        own = dict((layers or {}).get(path, spec))
        packable = kind == "matrix" and bits and shape[-1] % own["group_size"] == 0
        if packable and not any(part in name for part in dense):
            full = {"mode": "affine", **own}
            tensors |= quantized(rng, path, shape[0], shape[1], dtype=dtype, **full)
        else:
            tensors[name] = stored(random_dense(rng, shape, kind), dtype)
    if edit is not None:
        edit(tensors)
    write_weights(folder, tensors, shards)
    inner = TOKENIZERS[tokenizer]()
    inner.save(str(folder / "tokenizer.json"))
    end = inner.token_to_id("<|im_end|>") if eos is None else eos
    if "config" in eos_in:
        settings.setdefault("eos_token_id", end)
    if "generation_config" in eos_in:
        write_json(folder / "generation_config.json", {"eos_token_id": [end]})
    write_json(folder / "config.json", {k: v for k, v in settings.items() if v is not None})
    extra: dict[str, Any] = {"bos_token": {"content": "<s>"}} if tokenizer != "bytelevel" else {}
    if "tokenizer" in eos_in:
        extra["eos_token"] = inner.id_to_token(end)
    write_template(folder, extra, template, template_form)
    return folder


def write_template(
    folder: Path, settings: dict[str, Any], template: str | None, form: str = "string"
) -> None:
    """tokenizer_config.json with `settings`, and the template where `form` says."""
    if template is not None and form == "jinja":
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif template is not None and form == "list":
        other = {"name": "tool_use", "template": "{{ raise_exception('wrong template') }}"}
        settings["chat_template"] = [other, {"name": "default", "template": template}]
    elif template is not None:
        settings["chat_template"] = template
    write_json(folder / "tokenizer_config.json", settings)


# ---- architectures: config -> (tensor name, shape, kind), kind: matrix, norm or bias

Shapes = list[tuple[str, tuple[int, ...], str]]


def base_config(arch: str) -> dict[str, Any]:
    """config.json without quantization. K = 128, so that every group size divides it."""
    return {
        "architectures": [f"{arch.capitalize()}ForCausalLM"],
        "model_type": arch,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
    }


def decoder_shapes(c: Mapping[str, Any]) -> Shapes:
    """llama, qwen2 and qwen3, which differ in biases and q/k norms."""
    k, n = c["hidden_size"], c["intermediate_size"]
    d = c.get("head_dim") or k // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    qwen2, qwen3 = c["model_type"] == "qwen2", c["model_type"] == "qwen3"
    qkv_bias = qwen2 or c.get("attention_bias", False)
    shapes: Shapes = [("model.embed_tokens.weight", (c["vocab_size"], k), "matrix")]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."

        def linear(name: str, rows: int, columns: int, bias: bool, at: str = at) -> None:
            shapes.append((f"{at}{name}.weight", (rows, columns), "matrix"))
            if bias:
                shapes.append((f"{at}{name}.bias", (rows,), "bias"))

        shapes.append((f"{at}input_layernorm.weight", (k,), "norm"))
        linear("self_attn.q_proj", q, k, qkv_bias)
        linear("self_attn.k_proj", kv, k, qkv_bias)
        linear("self_attn.v_proj", kv, k, qkv_bias)
        linear("self_attn.o_proj", k, q, qkv_bias and not qwen2)
        if qwen3:
            shapes.append((f"{at}self_attn.q_norm.weight", (d,), "norm"))
            shapes.append((f"{at}self_attn.k_norm.weight", (d,), "norm"))
        shapes.append((f"{at}post_attention_layernorm.weight", (k,), "norm"))
        for name in ("gate_proj", "up_proj"):
            linear(f"mlp.{name}", n, k, c.get("mlp_bias", False))
        linear("mlp.down_proj", k, n, c.get("mlp_bias", False))
    shapes.append(("model.norm.weight", (k,), "norm"))
    if not c["tie_word_embeddings"]:
        shapes.append(("lm_head.weight", (c["vocab_size"], k), "matrix"))
    return shapes


ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], Shapes]] = {
    "llama": decoder_shapes,
    "mistral": decoder_shapes,
    "qwen2": decoder_shapes,
    "qwen3": decoder_shapes,
}


# ---- tensors


def random_dense(
    rng: np.random.Generator, shape: tuple[int, ...], kind: str
) -> npt.NDArray[np.float64]:
    if kind == "norm":
        return rng.uniform(0.5, 1.5, shape)
    if kind == "bias":
        return rng.normal(0, 0.3, shape)
    return rng.normal(0, 1.5 / np.sqrt(shape[-1]), shape)


def quantized(
    rng: np.random.Generator,
    path: str,
    n: int,
    k: int,
    *,
    bits: int,
    group_size: int,
    mode: str,
    dtype: str,
) -> dict[str, Stored]:
    """weight, scales and (affine) biases of a random N x K matrix, values of about 1.5/sqrt(K)."""
    q = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    groups = (n, k // group_size)
    if mode == "affine":
        top = (1 << bits) - 1
        size = 1.5 / np.sqrt(k) * np.sqrt(12) / top
        scales = size * rng.uniform(0.5, 1.5, groups) * rng.choice([-1, 1], groups)
        biases = -scales * top * rng.uniform(0.4, 0.6, groups)
        extra = {f"{path}.scales": stored(scales, dtype), f"{path}.biases": stored(biases, dtype)}
    elif mode == "nvfp4":
        extra = {f"{path}.scales": ("U8", rng.integers(0x10, 0x20, groups).astype(np.uint8))}
    else:
        if mode == "mxfp8":
            q = np.where(q & 127 == 127, 0, q) & 0xBF  # no NaN; exponents below 8: values under 2
        extra = {f"{path}.scales": ("U8", rng.integers(122, 125, groups).astype(np.uint8))}
    return {f"{path}.weight": ("U32", pack_bits(q, bits)), **extra}


def pack_bits(q: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint32]:
    """Codes (N, K) -> words (N, K*bits/32): code k in bits k*bits .. k*bits+bits-1 of its row."""
    if bits == 8:  # the same, quickly: a test may want a large model
        return q.astype(np.uint8).view("<u4")
    each = (q[:, :, None] >> np.arange(bits)) & 1
    rows = np.packbits(each.reshape(len(q), -1).astype(np.uint8), axis=1, bitorder="little")
    return rows.view("<u4")


def stored(values: npt.NDArray[Any], dtype: str) -> Stored:
    """Values in a safetensors float type; BF16 (round to nearest even) as uint16."""
    if dtype == "BF16":
        word = values.astype(np.float32).view(np.uint32)
        return dtype, ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16)
    return dtype, values.astype({"F16": np.float16, "F32": np.float32}[dtype])


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    """One file in the safetensors format."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, (dtype, array) in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def write_weights(folder: Path, tensors: Mapping[str, Stored], shards: int = 1) -> None:
    """model.safetensors, or that many shards and their index."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    names = list(tensors)
    size = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i * size : (i + 1) * size]}
        weight_map |= dict.fromkeys(part, file)
        write_safetensors(folder / file, part)
    total = sum(array.nbytes for _, array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")


# ---- tokenizers

_MERGES = [
    "t h",
    "Ġ t",
    "Ġt h",
    "Ġth e",
    "e r",
    "i n",
    "Ġ a",
    "o n",
    "l l",
    "h e",
    "he ll",
    "hell o",
]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2 style: every byte is a token; a few merges, one of them half an emoji."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(m.split(" ")) for m in _MERGES]
    merges.append(("ð", "Ł"))  # bytes F0 9F, with which most emoji begin
    tokens = alphabet + ["".join(m) for m in merges]
    inner = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    inner.add_tokens([AddedToken(ADDED, normalized=False)])
    return inner


def sentencepiece() -> tokenizers.Tokenizer:
    """llama-2 style: ▁ for spaces, <0xNN> for bytes without a token, one leading space dropped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "é"]
    tokens += [chr(c) for c in range(ord("a"), ord("z") + 1)]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a"), ("▁", "▁"), ("i", "n")]
    tokens += ["".join(m) for m in merges]
    vocab = {t: i for i, t in enumerate(tokens)}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    inner.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    inner.add_tokens([AddedToken(ADDED, normalized=False)])
    return inner


TOKENIZERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytelevel": byte_level,
    "sentencepiece": sentencepiece,
}
