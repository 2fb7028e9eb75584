"""Conversion of GGUF files and float folders, into folders that hold exactly what was asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import qrun.convert
import qrun.safetensors_writer
from qrun.convert import convert
from qrun.errors import CheckpointError, ModelNotFoundError, QrunError, UsageError
from qrun.gguf import open_gguf
from qrun.gguf_config import llama3_factors
from qrun.gguf_models import half_split_order
from qrun.microscaling import quantize_fp4
from qrun.quantization import Quantization, dequantize_ref
from tests.conftest import ROOT
from tests.gguf_writer import random_blocks, reference, tiny_gguf, write_gguf


@dataclass(frozen=True)
class TensorView:
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # (bytes,)


def read_safetensors(path: Path) -> dict[str, TensorView]:
    content = np.fromfile(path, np.uint8)
    start = 8 + int(content[:8].view("<u8")[0])
    header = json.loads(content[8:start].tobytes())
    header.pop("__metadata__", None)
    return {
        name: TensorView(e["dtype"], tuple(e["shape"]), content[start:][slice(*e["data_offsets"])])
        for name, e in header.items()
    }


Change = Callable[[dict[str, Any], dict[str, Any]], object]


def result(folder: Path) -> tuple[dict[str, Any], dict[str, TensorView]]:
    config = json.loads((folder / "config.json").read_text())
    assert config.get("quantization") == config.get("quantization_config")
    tensors: dict[str, TensorView] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= read_safetensors(path)
    return config, tensors


def values(view: TensorView) -> np.ndarray:
    kinds = {"F32": "<f4", "F16": "<f2", "U32": "<u4", "U8": "u1", "BF16": "<u2"}
    found = view.data.view(kinds[view.dtype]).reshape(view.shape)
    if view.dtype == "BF16":
        return (found.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return found.astype(np.float64) if view.dtype in ("F32", "F16") else found


def dequantized(config: dict[str, Any], tensors: dict[str, TensorView], name: str) -> np.ndarray:
    """Float64 values (N, K) of an affine matrix, unpacked here."""
    module = name.removesuffix(".weight")
    spec = config["quantization"]
    spec = spec.get(module, spec)
    bits, group = spec["bits"], spec["group_size"]
    w = values(tensors[name])
    if 32 % bits == 0:
        q = w[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & ((1 << bits) - 1)
    else:  # values that straddle words
        planes = np.unpackbits(w.view(np.uint8), axis=1, bitorder="little")
        q = planes.reshape(w.shape[0], -1, bits) @ (1 << np.arange(bits))
    q = q.reshape(w.shape[0], -1, group).astype(np.float64)
    scales, biases = values(tensors[f"{module}.scales"]), values(tensors[f"{module}.biases"])
    return (q * scales[..., None] + biases[..., None]).reshape(w.shape[0], -1)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """A tiny llama GGUF of a block type, after a change to its metadata and tensors."""

    def build(kind: str = "Q4_0", change: Change | None = None, **sizes: Any) -> Path:
        metadata, tensors = tiny_gguf(np.random.default_rng(3), kind, **sizes)
        if change:
            change(metadata, tensors)
        return write_gguf(tmp_path / "in.gguf", metadata, tensors)

    return build


# ---- GGUF


def expected_gguf(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a llama GGUF in float64, in Hugging Face's names and row order."""
    gguf = open_gguf(path)
    renames = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
    }
    renames |= {f"attn_{c}": f"self_attn.{c}_proj" for c in "qkv"}
    renames |= {f"ffn_{c}": f"mlp.{c}_proj" for c in ("gate", "up", "down")}
    hidden = gguf.metadata["llama.embedding_length"]
    head_dim = hidden // gguf.metadata["llama.attention.head_count"]
    found = {}
    for name, t in gguf.tensors.items():
        value = reference(t.type, gguf.rows(name).tobytes()).reshape(t.shape)
        *block, role, leaf = name.split(".")
        if role in ("attn_q", "attn_k"):
            heads = value.reshape(-1, head_dim // 2, 2, *value.shape[1:])
            value = np.concatenate([heads[:, :, 0], heads[:, :, 1]], axis=1).reshape(value.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        found[f"{prefix}{renames[role]}.{leaf}"] = value
    return found


def assert_equal_to_gguf(src: Path, folder: Path) -> None:
    config, tensors = result(folder)
    expected = expected_gguf(src)
    modules = {n for n in tensors if not n.endswith((".scales", ".biases"))}
    assert modules == expected.keys()
    for name, value in expected.items():
        if tensors[name].dtype == "U32":
            np.testing.assert_array_equal(dequantized(config, tensors, name), value, name)
        else:
            np.testing.assert_array_equal(values(tensors[name]), value.astype(np.float16), name)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_is_kept_bit_for_bit(make: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    report = convert(make(kind, tied=False), tmp_path / "out")
    assert_equal_to_gguf(tmp_path / "in.gguf", tmp_path / "out")
    assert (report.kept, report.quantized, report.dense) == (16, 0, 5)
    config, tensors = result(tmp_path / "out")
    assert config["quantization"]["bits"] == {"4": 4, "5": 5, "8": 8}[kind[1]]
    assert tensors["lm_head.scales"].dtype == "F16"


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_k_quants_keep_their_integers(make: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """Exact with float32 scales; with 16-bit ones, each scale and bias is rounded once."""
    src = make(kind, hidden=256, inner=256)
    convert(src, tmp_path / "exact", dtype="float32")
    config, tensors = result(tmp_path / "exact")
    for name, value in expected_gguf(src).items():
        if tensors[name].dtype == "U32":
            np.testing.assert_array_equal(dequantized(config, tensors, name), value, name)
    convert(src, tmp_path / "out")
    _, narrow = result(tmp_path / "out")
    for name, view in tensors.items():
        if view.dtype == "U32":
            assert (values(narrow[name]) == values(view)).all()
        else:
            assert (values(narrow[name]) == values(view).astype(np.float16)).all()


def test_q6_k_is_quantized_anew(make: Callable[..., Path], tmp_path: Path) -> None:
    src = make("Q6_K", hidden=256, inner=256)
    report = convert(src, tmp_path / "out")
    config, tensors = result(tmp_path / "out")
    assert (report.kept, report.quantized) == (0, 15)
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert report.notes[-1].startswith("15 matrices of Q6_K have become affine 4-bit, group 32: ")
    assert convert(src, tmp_path / "six", bits=6).notes == report.notes[:-1]
    for name, value in expected_gguf(src).items():
        if tensors[name].dtype == "U32":
            error = np.abs(dequantized(config, tensors, name) - value).reshape(-1, 32)
            spread = np.ptp(value.reshape(-1, 32), axis=1)
            assert (error.max(axis=1) <= spread / 15 * 1.01).all()  # MLX keeps one edge exact


def test_smollm2(smollm2_gguf: Path, smollm2: Path) -> None:
    """The real file: every quantized value bit for bit."""
    config, tensors = result(smollm2)
    assert config["quantization"]["model.embed_tokens"]["bits"] == 8
    gguf = open_gguf(smollm2_gguf)
    rows = gguf.rows("blk.3.attn_q.weight").copy().view(np.uint8).reshape(576, -1, 20)
    d = rows[..., :2].copy().view("<f2").astype(np.float64)
    m = rows[..., 2:4].copy().view("<f2").astype(np.float64)
    nibbles = np.concatenate([rows[..., 4:] & 15, rows[..., 4:] >> 4], axis=-1)
    expected = (nibbles * d + m).reshape(9, 32, 2, 576)
    expected = expected.transpose(0, 2, 1, 3).reshape(576, 576)
    name = "model.layers.3.self_attn.q_proj.weight"
    np.testing.assert_array_equal(dequantized(config, tensors, name), expected)
    for name, t in gguf.tensors.items():
        if "attn_q" in name or "attn_k" in name or t.type == "F32":
            continue
        new = name.replace("blk.", "model.layers.").replace("token_embd", "model.embed_tokens")
        new = new.replace("attn_output", "self_attn.o_proj").replace("attn_v", "self_attn.v_proj")
        for part in ("gate", "up", "down"):
            new = new.replace(f"ffn_{part}", f"mlp.{part}_proj")
        blocks = gguf.rows(name).copy().reshape(t.shape[0], -1, 20 if t.type == "Q4_1" else 34)
        d = blocks[..., :2].copy().view("<f2").astype(np.float64)
        if t.type == "Q4_1":
            m = blocks[..., 2:4].copy().view("<f2").astype(np.float64)
            q = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
        else:
            m, q = 0.0, blocks[..., 2:].view(np.int8).astype(np.float64)
        expected = (q * d + m).reshape(t.shape)
        np.testing.assert_array_equal(dequantized(config, tensors, new), expected, name)


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_gguf_floats(make: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """Float matrices stay as they are, unless a quantization is asked for."""
    convert(make(kind), tmp_path / "dense")
    config, tensors = result(tmp_path / "dense")
    assert "quantization" not in config
    wanted = "BF16" if kind == "BF16" else "F16"
    assert {t.dtype for t in tensors.values()} == {wanted}
    report = convert(tmp_path / "in.gguf", tmp_path / "out", bits=8)
    config, tensors = result(tmp_path / "out")
    assert config["quantization"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert report.quantized == 15


def test_asking_overrules_keeping(make: Callable[..., Path], tmp_path: Path) -> None:
    src = make("Q8_0")
    assert convert(src, tmp_path / "a", bits=8).kept == 15
    report = convert(src, tmp_path / "b", bits=4, group_size=64)
    assert (report.kept, report.quantized, report.dense) == (0, 15, 5)
    # inner 96 has no 64s
    assert report.notes[-1].startswith("2 matrices have smaller groups: 64 does not divide 96, the")
    config, _ = result(tmp_path / "b")
    down = config["quantization"]["model.layers.0.mlp.down_proj"]
    assert down == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert convert(src, tmp_path / "c", mode="mxfp4").quantized == 15


@pytest.mark.parametrize(
    ("kind", "wishes", "told"),
    [
        (
            "Q4_0",
            {"mode": "mxfp4"},
            "15 matrices of Q4_0 are rounded a second time, to mxfp4 4-bit",
        ),
        ("Q4_1", {"group_size": 64}, "15 matrices of Q4_1 are rounded a second time, to affine 4"),
        ("Q4_1", {"bits": 3}, "15 matrices of Q4_1 are rounded a second time, to affine 3-bit, gr"),
        ("Q4_1", {"bits": 2}, "15 matrices of Q4_1 are rounded a second time, to affine 2-bit, gr"),
        ("Q4_1", {"bits": 8}, ""),
        ("Q4_1", {"bits": 4}, ""),
        ("Q8_0", {"mode": "mxfp4"}, ""),
    ],
)
def test_four_bits_rounded_twice_are_told(
    kind: str, wishes: dict[str, Any], told: str, make: Callable[..., Path], tmp_path: Path
) -> None:
    notes = convert(make(kind, hidden=64, inner=128), tmp_path / "out", **wishes).notes
    found = [note for note in notes if "a second time" in note]
    assert [note.startswith(told) for note in found] == [True] * bool(told)
    assert all(note.endswith(": affine 4-bit, group 32, the default, keeps them") for note in found)


def test_another_group_size_costs_no_bits(make: Callable[..., Path], tmp_path: Path) -> None:
    src = make("Q8_0", hidden=64, inner=128)
    report = convert(src, tmp_path / "out", group_size=64)
    config, tensors = result(tmp_path / "out")
    assert config["quantization"] == {"group_size": 64, "bits": 8, "mode": "affine"}
    assert (report.quantized, report.notes) == (15, ())
    for name, value in expected_gguf(src).items():
        if tensors[name].dtype == "U32":
            error = np.abs(dequantized(config, tensors, name) - value).reshape(-1, 64)
            spread = np.ptp(value.reshape(-1, 64), axis=1)
            assert (error.max(axis=1) <= spread / 255 * 1.5).all()  # scales are float16


def test_bfloat16_leaves_exact_scales_alone(make: Callable[..., Path], tmp_path: Path) -> None:
    convert(make("Q4_1"), tmp_path / "out", dtype="bfloat16")
    _, tensors = result(tmp_path / "out")
    assert tensors["model.norm.weight"].dtype == "BF16"
    assert tensors["model.embed_tokens.scales"].dtype == "F16"


def test_config(make: Callable[..., Path], tmp_path: Path) -> None:
    convert(make(biases=True), tmp_path / "out")
    config, tensors = result(tmp_path / "out")
    assert config | {"quantization": 0, "quantization_config": 0} == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "vocab_size": 268,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
        "quantization": 0,
        "quantization_config": 0,
    }
    assert tensors["model.layers.1.self_attn.q_proj.bias"].shape == (64,)
    assert_equal_to_gguf(tmp_path / "in.gguf", tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_mlx_loads_it(make: Callable[..., Path], tmp_path: Path) -> None:
    src = make("Q4_1")
    convert(src, tmp_path / "out")
    tensors, metadata = mx.load(str(tmp_path / "out/model.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}
    name = "model.layers.0.mlp.up_proj"
    w, scales, biases = (tensors[f"{name}.{p}"] for p in ("weight", "scales", "biases"))
    back = mx.dequantize(
        w, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=4
    )
    expected = expected_gguf(src)[f"{name}.weight"]
    np.testing.assert_allclose(np.array(back), expected, atol=1e-6)


def test_half_split_order() -> None:
    assert half_split_order(8, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"rope.scale_linear": 2.0}, ("linear", 2.0)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 8.0,
                "rope.scaling.original_context_length": 32,
            },
            ("yarn", 8.0),
        ),
    ],
)
def test_rope(
    make: Callable[..., Path],
    tmp_path: Path,
    changes: dict[str, Any],
    expected: tuple[str, float] | None,
) -> None:
    src = make(change=lambda m, _: m.update({f"llama.{k}": v for k, v in changes.items()}))
    convert(src, tmp_path / "out")
    scaling = result(tmp_path / "out")[0].get("rope_scaling")
    assert expected == (scaling and (scaling["rope_type"], scaling["factor"]))


def with_rope_freqs(factors: np.ndarray) -> Change:
    raw = factors.astype("<f4").tobytes()
    return lambda _, tensors: tensors.update({"rope_freqs.weight": ("F32", (8,), raw)})


def test_llama3_rope(make: Callable[..., Path], tmp_path: Path) -> None:
    convert(make(change=with_rope_freqs(llama3_factors(8, 10000.0, 32.0, 8192))), tmp_path / "out")
    assert result(tmp_path / "out")[0]["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    convert(make(change=with_rope_freqs(np.ones(8))), tmp_path / "plain")
    assert "rope_scaling" not in result(tmp_path / "plain")[0]


def put(**changes: Any) -> Change:
    """Metadata changes, with `__` for a dot."""
    return lambda m, _: m.update({k.replace("__", "."): v for k, v in changes.items()})


def swap_blocks(value: float) -> Change:
    def change(_: Any, tensors: Any) -> None:
        kind, shape, raw = tensors["blk.1.ffn_up.weight"]
        raw = np.array([value], "<f2").tobytes() + raw[2:]
        tensors["blk.1.ffn_up.weight"] = (kind, shape, raw)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(general__architecture="mamba"), "unknown architecture 'mamba'"),
        (put(general__architecture=7), "unknown architecture 7"),
        (put(split__count=3), "one of 3 parts, but its name"),
        (put(llama__expert_count=8), "expert_used_count is missing"),
        (put(llama__block_count=2**31), "layers"),
        (put(llama__block_count=3), "tensor blk.2.attn_k.weight and 8 more missing"),
        (put(llama__block_count=1), "tensor blk.1."),
        (put(llama__attention__head_count=0), "heads"),
        (put(llama__attention__head_count=2**31), "heads"),
        (put(llama__attention__head_count="four"), "head_count is not one number"),
        (put(llama__attention__head_count_kv=[2, 1]), "head_count_kv is not one number"),
        (put(llama__embedding_length=32), "the metadata make it"),
        (put(llama__embedding_length=-5), "embedding_length is -5"),
        (put(llama__rope__dimension_count=8), "rope turns 8 of 16"),
        (put(llama__rope__scaling__type="spiral"), "unknown rope scaling type 'spiral'"),
        (with_rope_freqs(np.linspace(1, 2, 8)), "not Llama 3's scaling"),
        (lambda m, _: m.pop("llama.feed_forward_length"), "feed_forward_length is missing"),
        (lambda m, _: m.pop("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens is missing"),
        (lambda _, t: t.pop("token_embd.weight"), "token_embd.weight is missing"),
        (lambda _, t: t.pop("output_norm.weight"), "output_norm.weight missing"),
        (
            lambda _, t: t.update({"blk.0.surprise.weight": t["blk.0.ffn_up.weight"]}),
            "blk.0.surprise.weight has no place",
        ),
        (swap_blocks(np.nan), "up_proj.weight holds NaN"),
        (swap_blocks(60000.0), "beyond the largest F16"),
    ],
)
def test_refuses_by_name(
    make: Callable[..., Path], tmp_path: Path, change: Change, reason: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        convert(make(change=change), tmp_path / "out")
    message = str(error.value)
    assert "in.gguf" in message
    assert reason in message
    assert "\n" not in message
    assert os.listdir(tmp_path) == ["in.gguf"]


def test_wide_scales_fit_float32(make: Callable[..., Path], tmp_path: Path) -> None:
    src = make(change=swap_blocks(60000.0))
    convert(src, tmp_path / "out", dtype="float32")
    config, tensors = result(tmp_path / "out")
    name = "model.layers.1.mlp.up_proj.weight"
    expected = expected_gguf(src)[name]
    np.testing.assert_array_equal(dequantized(config, tensors, name), expected)


def test_mutated_gguf_never_escapes(make: Callable[..., Path], tmp_path: Path) -> None:
    """A changed byte converts, or is refused in one line, and leaves nothing behind."""
    src = make(layers=1)
    content = src.read_bytes()
    rng = np.random.default_rng(11)
    lines: list[str] = []
    for _ in range(200):
        at, value = int(rng.integers(0, 9000)), int(rng.integers(0, 256))
        src.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
        try:
            convert(src, tmp_path / "out", force=True)
        except QrunError as error:
            lines.append(str(error))
    assert lines
    assert not any("\n" in line for line in lines)
    assert set(os.listdir(tmp_path)) <= {"in.gguf", "out"}


# ---- folders


def bf16(a: np.ndarray) -> bytes:
    return (np.asarray(a, "<f4").view("<u4") >> 16).astype("<u2").tobytes()


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bfloat16 checkpoint with what a real one has beside its weights."""
    path = tmp_path / "in"
    path.mkdir()
    rng = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (50, 128),
        "model.layers.0.mlp.up_proj.weight": (97, 128),
        "model.layers.0.mlp.odd.weight": (128, 97),
        "model.layers.0.mlp.up_proj.bias": (97,),
        "model.norm.weight": (128,),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
        "lm_head.weight": (50, 128),
    }
    tensors = {n: ("BF16", s, bf16(rng.normal(size=s))) for n, s in shapes.items()}
    write_safetensors(path / "model.safetensors", tensors)
    config = {"model_type": "llama", "torch_dtype": "bfloat16", "tie_word_embeddings": True}
    config |= {"auto_map": {"AutoModel": "modeling.Evil"}, "kept": [1, {"x": None}]}
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).write_text(f'{{"name": "{name}"}}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "modeling.py").write_text("raise SystemExit")
    return path


def test_folder(folder: Path, tmp_path: Path) -> None:
    report = convert(folder, tmp_path / "out")
    config, tensors = result(tmp_path / "out")
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    assert config == {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
        "kept": [1, {"x": None}],
        "quantization": quantization,
        "quantization_config": quantization,
    }
    assert (report.kept, report.quantized, report.dense) == (0, 2, 3)
    assert "lm_head.weight" not in tensors
    assert not any("inv_freq" in name for name in tensors)
    original = read_safetensors(folder / "model.safetensors")
    dense = ("model.layers.0.mlp.odd.weight", "model.layers.0.mlp.up_proj.bias")
    for name in (*dense, "model.norm.weight"):
        assert tensors[name].data.tobytes() == original[name].data.tobytes()
    copied = {p.name for p in (tmp_path / "out").iterdir()}
    assert copied == {p.name for p in folder.iterdir()} - {"modeling.py"}


@pytest.mark.parametrize(
    ("bits", "group", "mode"),
    [(b, g, "affine") for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)]
    + [(4, 32, "mxfp4"), (8, 32, "mxfp8"), (4, 16, "nvfp4")],
)
@pytest.mark.parametrize("chunk", [1 << 22, 1000])
def test_folder_equals_mx_quantize(
    folder: Path,
    tmp_path: Path,
    bits: int,
    group: int,
    mode: str,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Piece by piece or at once, the result is MLX's own."""
    monkeypatch.setattr(qrun.convert, "CHUNK", chunk)
    convert(folder, tmp_path / "out", bits=bits, group_size=group, mode=mode)
    found, tensors = mx.load(str(tmp_path / "out/model.safetensors")), result(tmp_path / "out")[1]
    name = "model.layers.0.mlp.up_proj"
    source = mx.load(str(folder / "model.safetensors"))[f"{name}.weight"].astype(mx.float32)
    expected = mx.quantize(source, group_size=group, bits=bits, mode=mode, stream=mx.cpu)
    parts = ("weight", "scales", "biases")
    for part, array in zip(parts, expected, strict=False):
        want = array.astype(mx.bfloat16) if array.dtype == mx.float32 else array
        assert found[f"{name}.{part}"].dtype == want.dtype
        assert mx.array_equal(found[f"{name}.{part}"], want).item()
    assert (f"{name}.biases" in tensors) == (mode == "affine")
    config = result(tmp_path / "out")[0]
    assert config["quantization"] == {"group_size": group, "bits": bits, "mode": mode}


@pytest.mark.parametrize(("mode", "group"), [("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("shape", [(1, 32), (129, 1024), (5, 4864)])
def test_fp4_is_mlx_s(mode: str, group: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=shape) * np.exp2(rng.integers(-5, 6, (shape[0], 1)))
    values[0, :32] = (0, 0.25, 0.75, -0.0, -0.2, -5, 6, 2.5, *(1.25, 1.75, 3.5, -6) * 6)
    values[-1, -32:] = 0
    ours = quantize_fp4(values.astype(np.float32), mode)
    theirs = mx.quantize(mx.array(values, mx.float32), group, 4, mode, stream=mx.cpu)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, np.array(b))


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 3e38])
def test_fp4_at_the_ends_of_float32(mode: str, size: float) -> None:
    """MLX makes NaN of the smallest."""
    values = np.full((1, 32), size, np.float32)
    w, scales = quantize_fp4(values, mode)
    found = dequantize_ref(w, scales, None, Quantization(4, 32 if mode == "mxfp4" else 16, mode))
    assert np.isfinite(found).all()
    assert (found <= 1.25 * values.astype(np.float64)).all()
    assert mode == "nvfp4" or abs(found - values).max() <= max(size / 4, 1e-38)


@pytest.mark.parametrize(
    ("stored", "declared", "asked", "expected"),
    [
        ("F32", "float32", None, "F16"),
        ("F32", None, "bfloat16", "BF16"),
        ("F16", "float16", None, "F16"),
        ("F16", None, None, "F16"),
        ("F32", "float32", "float32", "F32"),
    ],
)
def test_dtype(
    folder: Path, tmp_path: Path, stored: str, declared: str | None, asked: str, expected: str
) -> None:
    rng = np.random.default_rng(5)
    raw = rng.normal(size=(4, 64)).astype("<f4" if stored == "F32" else "<f2").tobytes()
    vector = np.ones(3, "<f4" if stored == "F32" else "<f2").tobytes()
    tensors = {"a.weight": (stored, (4, 64), raw), "norm.weight": (stored, (3,), vector)}
    ids = np.arange(5, dtype="<i8").tobytes()
    write_safetensors(folder / "model.safetensors", {**tensors, "ids": ("I64", (5,), ids)})
    config = {"model_type": "llama"} | ({"dtype": declared} if declared else {})
    (folder / "config.json").write_text(json.dumps(config))
    report = convert(folder, tmp_path / "out", dtype=asked)
    config, found = result(tmp_path / "out")
    assert found["a.scales"].dtype == found["norm.weight"].dtype == expected
    assert found["ids"].data.tobytes() == ids
    assert config["dtype" if declared else "torch_dtype"] == report.dtype


def test_shards(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from shards and written to shards, a matrix stays with its scales."""
    convert(folder, tmp_path / "one")
    tensors = {
        n: (v.dtype, v.shape, v.data.tobytes())
        for n, v in read_safetensors(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    where = {}
    for i, half in enumerate((list(tensors)[:3], list(tensors)[3:])):
        name = f"model-0000{i + 1}-of-00002.safetensors"
        write_safetensors(folder / name, {n: tensors[n] for n in half})
        where |= dict.fromkeys(half, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    monkeypatch.setattr(qrun.safetensors_writer, "MAX_SHARD_BYTES", 8000)
    report = convert(folder, tmp_path / "many")
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert report.shards == len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == report.nbytes
    for name, file in index["weight_map"].items():
        assert name in read_safetensors(tmp_path / "many" / file)
        module = name.rpartition(".")[0]
        assert index["weight_map"].get(f"{module}.scales", file) == file
    one, many = result(tmp_path / "one")[1], result(tmp_path / "many")[1]
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(one[n].data.tobytes() == many[n].data.tobytes() for n in one)


def test_items_are_aligned(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "out", mode="mxfp4")
    path = tmp_path / "out/model.safetensors"
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8:start])
    assert start % 64 == 0
    for name, entry in header.items():
        if name != "__metadata__":
            item = qrun.safetensors_writer.ITEM_BYTES[entry["dtype"]]
            assert (start + entry["data_offsets"][0]) % item == 0


@pytest.mark.parametrize(
    ("recipe", "low", "high"), [("mixed_4_6", 4, 6), ("mixed_4_8", 4, 8), ("mixed_3_6", 3, 6)]
)
def test_recipe(folder: Path, tmp_path: Path, recipe: str, low: int, high: int) -> None:
    """Embedding and head; down_proj and v_proj in the first and last eighth of 16 layers."""
    names = ("self_attn.v_proj", "self_attn.q_proj", "mlp.down_proj")
    modules = [f"model.layers.{i}.{n}" for i in range(16) for n in names]
    modules += ["model.embed_tokens", "lm_head"]
    raw = bf16(np.random.default_rng(1).normal(size=(8, 128)))
    write_safetensors(
        folder / "model.safetensors", {f"{m}.weight": ("BF16", (8, 128), raw) for m in modules}
    )
    (folder / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}')
    report = convert(folder, tmp_path / "out", recipe=recipe)
    config, tensors = result(tmp_path / "out")
    better = {f"model.layers.{i}.{n}" for i in (0, 1, 14, 15) for n in (names[0], names[2])}
    better |= {"model.embed_tokens", "lm_head"}
    for module in modules:
        bits = high if module in better else low
        assert tensors[f"{module}.weight"].shape == (8, 128 * bits // 32)
        assert config["quantization"].get(module, config["quantization"])["bits"] == bits
    mean = (len(better) * high + (len(modules) - len(better)) * low) / len(modules) + 32 / 64
    assert report.bits_per_weight == pytest.approx(mean)
    assert report.formats == {
        f"affine {low}-bit, group 64": 1024 * (len(modules) - len(better)),
        f"affine {high}-bit, group 64": 1024 * len(better),
    }


def test_recipe_keeps_what_fits(make: Callable[..., Path], tmp_path: Path) -> None:
    report = convert(make("Q8_0"), tmp_path / "out", recipe="mixed_4_8")
    assert (report.kept, report.quantized) == (5, 10)  # embedding, v and down of both layers


EXPERTS = {
    "qwen3_moe": ("mlp.experts.{}.{}", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts.{}.{}", ("w1", "w3", "w2")),
}


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("chunk", [1 << 22, 64 * 7])
def test_experts_are_stacked(
    folder: Path, tmp_path: Path, kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qrun.convert, "CHUNK", chunk)
    pattern, projections = EXPERTS[kind]
    rng = np.random.default_rng(1)
    single = {
        f"model.layers.0.{pattern.format(e, p)}.weight": rng.normal(size=(6, 64)).astype("<f2")
        for p in projections
        for e in range(12)
    }
    block = pattern.split(".")[0]
    tensors = {n: ("F16", v.shape, v.tobytes()) for n, v in single.items()}
    router = rng.normal(size=(12, 64)).astype("<f2")
    tensors[f"model.layers.0.{block}.gate.weight"] = ("F16", (12, 64), router.tobytes())
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    convert(folder, tmp_path / "out")
    found = mx.load(str(tmp_path / "out/model.safetensors"))
    for name, p in zip(("gate_proj", "up_proj", "down_proj"), projections, strict=True):
        parts = [single[f"model.layers.0.{pattern.format(e, p)}.weight"] for e in range(12)]
        stack = mx.array(np.stack(parts).astype(np.float32))
        w, scales, _ = mx.quantize(stack, group_size=64, bits=4, stream=mx.cpu)
        module = f"model.layers.0.{block}.switch_mlp.{name}"
        assert mx.array_equal(found[f"{module}.weight"], w).item()
        assert mx.array_equal(found[f"{module}.scales"], scales.astype(mx.float16)).item()
    assert found[f"model.layers.0.{block}.gate.weight"].dtype == mx.float16
    assert len(found) == 10
    del tensors[f"model.layers.0.{pattern.format(5, projections[0])}.weight"]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="an expert is missing before"):
        convert(folder, tmp_path / "other")


def spoil(name: str, edit: Callable[[bytes], bytes | None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = edit((folder / name).read_bytes() if (folder / name).exists() else b"")
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)

    return apply


def config_with(**keys: Any) -> Callable[[Path], None]:
    return spoil("config.json", lambda c: json.dumps(json.loads(c) | keys).encode())


SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def to_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / SHARD)


def half_indexed(folder: Path) -> None:
    to_shard(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')


def wrongly_indexed(folder: Path) -> None:
    to_shard(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": SHARD}}))


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (spoil("config.json", lambda _: None), "config.json", "missing"),
        (spoil("config.json", lambda c: c[:-5]), "config.json", "not valid JSON"),
        (config_with(model_type=None), "config.json", "no model_type"),
        (config_with(quantization={"bits": 4}), "in", "already quantized (quantization"),
        (config_with(quantization_config={"quant_method": "awq"}), "in", "already quantized"),
        (spoil("model.safetensors", lambda _: None), "in", "no model.safetensors"),
        (spoil("model.safetensors", lambda c: c[:-1]), "model.safetensors", "truncated"),
        (spoil("model.safetensors", lambda c: c[:50]), "model.safetensors", "truncated"),
        (spoil("model.safetensors", lambda _: b"<html></html>"), "model.safetensors", "web page"),
        (to_shard, SHARD, f"no {INDEX}"),
        (half_indexed, "model-00002-of-00002.safetensors", "missing"),
        (wrongly_indexed, SHARD, "omits"),
    ],
)
def test_refuses_damaged_folders(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], file: str, reason: str
) -> None:
    """The checks are the loader's; here, that they come before anything is written."""
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        convert(folder, tmp_path / "out")
    assert file in str(error.value)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["in"]


def test_refuses_nan(folder: Path, tmp_path: Path) -> None:
    raw = np.full((2, 64), np.nan, "<f4").tobytes()
    write_safetensors(folder / "model.safetensors", {"a.weight": ("F32", (2, 64), raw)})
    with pytest.raises(CheckpointError, match=r"in: tensor a\.weight holds NaN or infinity"):
        convert(folder, tmp_path / "out")


# ---- the target


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bits": 7}, "7 bits are not supported"),
        ({"group_size": 16}, "group size 16 is not supported"),
        ({"mode": "mxfp4", "bits": 8}, "mxfp4 is 4 bits in groups of 32"),
        ({"mode": "int4"}, "unknown quantization mode 'int4'"),
        ({"dtype": "float64"}, "unknown dtype 'float64'"),
        ({"recipe": "soup"}, "unknown recipe 'soup'"),
        ({"recipe": "mixed_4_8", "bits": 4}, "a recipe sets the bits itself"),
    ],
)
def test_refuses_options(
    folder: Path, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        convert(folder, tmp_path / "out", **options)


def test_refuses_missing_source(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"none\.gguf: no such file"):
        convert(tmp_path / "none.gguf", tmp_path / "out")


def test_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="neither a GGUF file nor a folder"):
        convert(tmp_path / "pytorch_model.bin", tmp_path / "out")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "m.gguf"])
def test_a_pipe_in_a_files_place_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    """Opening one would wait for a writer."""
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"{name} is a pipe, not a file"):
        convert(path if name == "m.gguf" else folder, tmp_path / "out")


def test_existing_target(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(folder, out)
    (out / "merges.txt").touch()
    with pytest.raises(UsageError, match="exists already"):
        convert(folder, out)
    assert (out / "merges.txt").exists()
    convert(folder, out, bits=8, force=True)
    assert not (out / "merges.txt").exists()
    assert result(out)[0]["quantization"]["bits"] == 8
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_what_ended_first_stays(folder: Path, tmp_path: Path) -> None:
    """Another conversion makes the target while this one is under way."""
    out = tmp_path / "out"

    def meanwhile(phase: str, done: int, total: int) -> None:
        if not out.exists():
            convert(folder, out, bits=8)

    with pytest.raises(UsageError, match="exists already"):
        convert(folder, out, bits=4, progress=meanwhile)
    assert result(out)[0]["quantization"]["bits"] == 8
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_force_does_not_delete_other_things(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.txt").touch()
    for target in (tmp_path / "home", tmp_path / "home/thesis.txt"):
        with pytest.raises(UsageError, match="--force does not replace it"):
            convert(folder, target, force=True)
    for target in (folder, tmp_path):
        with pytest.raises(UsageError, match="holds the source"):
            convert(folder, target, force=True)
    # A config.json alone makes no model folder: any web project has one.
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="src is no part of a model"):
        convert(folder, project, force=True)
    assert (project / "src").is_dir()
    out = tmp_path / "out"
    convert(folder, out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt is no part of a model"):
        convert(folder, out, force=True)
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_broken_link_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    """It was left out, and the model converted without it."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "no blob")
    with pytest.raises(CheckpointError, match=rf"{name} is a broken link, not a file"):
        convert(folder, tmp_path / "out")


def test_a_file_without_tensors_is_refused(folder: Path, tmp_path: Path) -> None:
    write_safetensors(folder / "model.safetensors", {})
    with pytest.raises(CheckpointError, match="holds no tensors"):
        convert(folder, tmp_path / "out")


def test_a_target_below_a_file_is_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("mine")
    (folder / "config.json").unlink()  # reading the source would fail
    with pytest.raises(QrunError, match=r"out: cannot be written: .*file\.txt is a file") as caught:
        convert(folder, tmp_path / "file.txt/deeper/out")
    assert caught.value.exit_code == 1
    assert (tmp_path / "file.txt").read_text() == "mine"


def test_matrices_that_a_group_does_not_divide_are_told(folder: Path, tmp_path: Path) -> None:
    report = convert(folder, tmp_path / "out", group_size=128)
    odd = "97, the width of model.layers.0.mlp.odd.weight"
    assert report.notes == (f"1 matrices stay dense: 128 does not divide {odd}",)


def test_a_group_that_does_not_divide_makes_no_larger_model(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    src = make("Q4_1", hidden=64, inner=128)
    report = convert(src, tmp_path / "out", group_size=128)
    assert report.notes[-1].startswith("13 matrices have smaller groups: 128 does not divide 64, ")
    assert report.nbytes < convert(src, tmp_path / "default").nbytes


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("existing", [False, True])
def test_interruption_leaves_nothing(
    folder: Path, tmp_path: Path, failure: type[BaseException], existing: bool
) -> None:
    out = tmp_path / "out"
    if existing:
        convert(folder, out)
    before = {p: p.read_bytes() for p in out.glob("*")}

    def interrupt(phase: str, done: int, total: int) -> None:
        if done > total // 2:
            raise failure

    with pytest.raises(failure):
        convert(folder, out, bits=8, force=existing, progress=interrupt)
    assert {p: p.read_bytes() for p in out.glob("*")} == before
    assert sorted(os.listdir(tmp_path)) == (["in", "out"] if existing else ["in"])


def test_an_interruption_between_the_renames_puts_the_old_model_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert(folder, out)
    before = {p: p.read_bytes() for p in out.glob("*")}
    rename = os.rename

    def once(a: Path, b: Path) -> None:
        rename(a, b)
        monkeypatch.setattr(os, "rename", rename)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", once)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, out, bits=8, force=True)
    assert {p: p.read_bytes() for p in out.glob("*")} == before
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


KILLED = """
    import os, signal, sys
    import qrun.placing
    from qrun.convert import convert
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[3] == "writing":
        convert(sys.argv[1], sys.argv[2], force=True, progress=die)
    rename = os.rename
    def once(a, b):  # what was there is set aside; the new one never comes
        rename(a, b)
        die()
    os.rename = once
    convert(sys.argv[1], sys.argv[2], force=True)
"""


@pytest.mark.parametrize("when", ["writing", "replacing"])
@pytest.mark.parametrize("existing", [False, True])
def test_what_a_killed_conversion_left_is_cleared(
    folder: Path, tmp_path: Path, when: str, existing: bool
) -> None:
    out = tmp_path / "out"
    if existing:
        convert(folder, out, bits=8)
    before = {p.name: p.read_bytes() for p in out.glob("*")}
    run = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(out), when]
    assert subprocess.run(run, cwd=ROOT).returncode == -signal.SIGKILL
    mine = tmp_path / ".out.mynotes1"
    mine.mkdir()
    (mine / "text").write_text("mine")
    if existing:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(UsageError, match="exists already"):
                convert(folder, out)
        assert len(caught) == (when == "replacing")
        assert {p.name: p.read_bytes() for p in out.glob("*")} == before
    else:
        convert(folder, out, force=True)
    assert sorted(os.listdir(tmp_path)) == [".out.mynotes1", "in", "out"]
    assert (mine / "text").read_text() == "mine"


def test_a_conversion_under_way_is_left_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made: list[int] = []

    def another(phase: str, done: int, total: int) -> None:
        if not made:
            made.append(done)
            convert(folder, out)

    with pytest.raises(UsageError, match="exists already"):
        convert(folder, out, progress=another)
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    assert (out / "config.json").is_file()


def test_full_disk_is_one_line(folder: Path, tmp_path: Path, python: Callable[..., str]) -> None:
    """A real write error: the process may not make files of more than 4,000 bytes."""
    script = """
        import resource, sys
        from qrun.convert import convert
        from qrun.errors import QrunError
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        try:
            convert(sys.argv[1], sys.argv[2])
        except QrunError as error:
            print(error, "|", error.hint)
    """
    assert python(textwrap.dedent(script), folder, tmp_path / "out") == (
        f"{tmp_path / 'out'}: cannot be written: File too large | "
        "free some space, or choose another disk\n"
    )
    assert os.listdir(tmp_path) == ["in"]


def test_progress(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = convert(folder, tmp_path / "out", progress=lambda *step: seen.append(step))
    done = [d for _, d, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == ("converting", report.nbytes, report.nbytes)


def test_memory_stays_small(tmp_path: Path, python: Callable[..., str]) -> None:
    """A 96 MiB tensor passes through in pieces."""
    script = """
        import sys
        import mlx.core
        from qrun.convert import convert
        from qrun.hardware import peak_memory
        before = peak_memory()
        convert(sys.argv[1], sys.argv[2], bits=4)
        print((peak_memory() - before) >> 10)
    """
    inner = 1 << 17

    def big(_: Any, tensors: Any) -> None:
        raw = random_blocks("F16", (inner, 64), np.random.default_rng(0))
        for name in list(tensors):
            if "ffn_up" in name or "ffn_gate" in name:
                tensors[name] = ("F16", (inner, 64), raw)
            if "ffn_down" in name:
                tensors[name] = ("F16", (64, inner), raw)

    metadata, tensors = tiny_gguf(np.random.default_rng(3), "F16")
    big(metadata, tensors)
    metadata["llama.feed_forward_length"] = inner
    src = write_gguf(tmp_path / "in.gguf", metadata, tensors)
    mapped = src.stat().st_size // 1024  # pages of the mapped source count as resident
    used = int(python(textwrap.dedent(script), src, tmp_path / "out"))
    src.unlink()  # 100 MB that pytest would keep
    assert used < mapped + 120_000
