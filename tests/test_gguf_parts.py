"""GGUFs of mixtures of experts, and GGUFs in several parts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.convert import convert
from qrun.errors import CheckpointError
from qrun.loader import load
from tests.gguf_writer import reference, tiny_gguf, write_gguf

EXPERTS = {
    "ffn_gate_inp": "gate",
    "ffn_gate_exps": "switch_mlp.gate_proj",
    "ffn_up_exps": "switch_mlp.up_proj",
    "ffn_down_exps": "switch_mlp.down_proj",
}


def mixture(arch: str, kind: str = "F16") -> tuple[dict[str, Any], dict[str, Any]]:
    return tiny_gguf(np.random.default_rng(4), kind, arch=arch, experts=4)


@pytest.mark.parametrize(
    ("arch", "at", "expected"),
    [
        ("llama", "block_sparse_moe", {"model_type": "mixtral", "num_local_experts": 4}),
        (
            "qwen3moe",
            "mlp",
            {
                "model_type": "qwen3_moe",
                "num_experts": 4,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
            },
        ),
    ],
)
def test_mixtures(arch: str, at: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """Stacks of experts and routers arrive whole, and the model runs."""
    metadata, tensors = mixture(arch)
    src = write_gguf(tmp_path / "in.gguf", metadata, tensors)
    convert(src, tmp_path / "out", dtype="float32")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.items() >= ({"num_experts_per_tok": 2} | expected).items()
    found = mx.load(str(tmp_path / "out/model.safetensors"))
    assert isinstance(found, dict)
    for old, new in EXPERTS.items():
        kind, shape, raw = tensors[f"blk.1.{old}.weight"]
        values = reference(kind, raw).reshape(shape).astype(np.float32)
        got = np.array(found[f"model.layers.1.{at}.{new}.weight"])
        np.testing.assert_array_equal(got, values)
    model = load(tmp_path / "out")
    cache = model.new_cache(8)
    logits = model.model.logits(model.model(mx.array([1, 2, 3], mx.int32), cache))
    assert np.isfinite(np.array(logits)).all()


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_quantized_mixtures_keep_their_integers(arch: str, tmp_path: Path) -> None:
    metadata, tensors = mixture(arch, "Q4_1")
    report = convert(write_gguf(tmp_path / "in.gguf", metadata, tensors), tmp_path / "out")
    assert report.kept == 1 + 2 * 7  # all matrices but the routers
    assert load(tmp_path / "out").model is not None


def apart(tensors: dict[str, Any]) -> dict[str, Any]:
    """Each stack as a tensor an expert, the last expert first."""
    found: dict[str, Any] = {}
    for name, (kind, shape, raw) in tensors.items():
        if "_exps." not in name:
            found[name] = kind, shape, raw
            continue
        size = len(raw) // shape[0]
        for e in reversed(range(shape[0])):
            part = raw[e * size : (e + 1) * size]
            found[name.replace("_exps.", f".{e}.")] = kind, shape[1:], part
    return found


@pytest.mark.parametrize("kind", ["F16", "Q4_1", "Q6_K"])
def test_experts_one_by_one(kind: str, tmp_path: Path) -> None:
    """As files before April 2024 have them: the same model comes out."""
    metadata, tensors = tiny_gguf(
        np.random.default_rng(4), kind, hidden=256, inner=256, experts=4, layers=1
    )
    convert(write_gguf(tmp_path / "a.gguf", metadata, tensors), tmp_path / "a")
    convert(write_gguf(tmp_path / "b.gguf", metadata, apart(tensors)), tmp_path / "b")
    a, b = (mx.load(str(tmp_path / name / "model.safetensors")) for name in "ab")
    assert isinstance(a, dict)
    assert isinstance(b, dict)
    assert a.keys() == b.keys()
    assert all(mx.array_equal(a[name], b[name]).item() for name in a)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, t: t.pop("blk.1.ffn_up.2.weight"), "blk.1.ffn_up.2.weight missing"),
        (lambda m, t: m.update({"llama.expert_count": 5}), "blk.0.ffn_down.4.weight and 5 more"),
        (lambda m, t: m.update({"llama.expert_count": 3}), "ffn_gate.3.weight has no place"),
        (lambda m, t: m.update({"llama.expert_count": 1 << 31}), "2147483648 experts, but"),
        (
            lambda m, t: t.update({"blk.1.ffn_up.2.weight": t["blk.1.attn_q.weight"]}),
            "ffn_up.2.weight has shape (64, 64), the metadata make it (96, 64)",
        ),
    ],
)
def test_experts_one_by_one_that_do_not_fit(change: Any, reason: str, tmp_path: Path) -> None:
    metadata, tensors = mixture("llama")
    tensors = apart(tensors)
    change(metadata, tensors)
    src = write_gguf(tmp_path / "in.gguf", metadata, tensors)
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        convert(src, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("expert_shared_count", 1, "qwen3moe.expert_shared_count is not converted"),
        ("expert_gating_func", 2, "qwen3moe.expert_gating_func is not converted"),
        ("expert_used_count", 9, "9 of 4 experts a token"),
    ],
)
def test_other_routers_are_refused(key: str, value: int, reason: str, tmp_path: Path) -> None:
    metadata, tensors = mixture("qwen3moe")
    src = write_gguf(tmp_path / "in.gguf", metadata | {f"qwen3moe.{key}": value}, tensors)
    with pytest.raises(CheckpointError, match=reason):
        convert(src, tmp_path / "out")


def test_experts_of_a_dense_architecture_are_refused(tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf(np.random.default_rng(4), arch="qwen2")
    src = write_gguf(tmp_path / "in.gguf", metadata | {"qwen2.expert_count": 4}, tensors)
    with pytest.raises(CheckpointError, match="a mixture of experts, which is not converted"):
        convert(src, tmp_path / "out")


def split(folder: Path, count: int = 3) -> tuple[Path, list[Path]]:
    """The same small model as one file and as `count` parts."""
    metadata, tensors = tiny_gguf(np.random.default_rng(4), "Q4_0")
    whole = write_gguf(folder / "whole.gguf", metadata, tensors)
    names = list(tensors)
    parts: list[Path] = []
    for i in range(count):
        numbers = {"split.no": i, "split.count": count, "split.tensors.count": len(names)}
        part = {n: tensors[n] for n in names[i::count]}
        path = folder / f"m-{i + 1:05}-of-{count:05}.gguf"
        parts.append(write_gguf(path, (metadata if i == 0 else {}) | numbers, part))
    return whole, parts


@pytest.mark.parametrize("given", [0, 2])
def test_parts_convert_like_the_whole(given: int, tmp_path: Path) -> None:
    """Whichever part is named."""
    whole, parts = split(tmp_path)
    convert(whole, tmp_path / "a")
    convert(parts[given], tmp_path / "b")
    a, b = (mx.load(str(tmp_path / name / "model.safetensors")) for name in "ab")
    assert isinstance(a, dict)
    assert isinstance(b, dict)
    assert a.keys() == b.keys()
    assert all(mx.array_equal(a[name], b[name]).item() for name in a)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_broken_parts_are_named(tmp_path: Path) -> None:
    _, parts = split(tmp_path)
    other = parts[1].read_bytes()

    def refused(reason: str) -> None:
        with pytest.raises(CheckpointError, match=reason):
            convert(parts[0], tmp_path / "out")

    parts[1].unlink()
    refused("1 of 3 parts are missing: m-00002-of-00003.gguf")
    parts[1].write_bytes(parts[2].read_bytes())
    refused("m-00002-of-00003.gguf: is not part 2 of 3")
    parts[1].write_bytes(other[:-50])
    refused("m-00002-of-00003.gguf: truncated")
    parts[1].write_bytes(other)
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="does not end in -of-00003"):
        convert(tmp_path / "renamed.gguf", tmp_path / "out")
