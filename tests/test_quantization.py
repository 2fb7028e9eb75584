"""What config.json and shapes say of quantization: every line of that part of FORMAT.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.config import Config
from qrun.declared import Declared
from qrun.errors import CheckpointError
from qrun.layers import Embedding, Linear, QuantizedLinear
from qrun.loader import LoadedModel, load
from qrun.quantization import Quantization, dequantize_ref, e4m3, infer, pack, unpack
from tests import reference, tiny, zoo
from tests.test_models import TOLERANCE, run

AFFINE = [(bits, group, "affine") for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = [*AFFINE, (4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")]
CASE = "llama_wide"
Edit = Callable[[dict[str, Any], dict[str, tiny.Stored]], None]
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def checked(folder: Path, tensors: dict[str, Any], spec: Quantization) -> LoadedModel:
    """Load, and compare a prefill and steps with float64 on what the codes stand for."""
    model = load(folder, dtype="float32")
    ids = zoo.ids_of(CASE, 24)
    values = reference.unpacked(tensors, spec)
    want = reference.logits_of(zoo.config_of(CASE), values, ids, 24)
    np.testing.assert_allclose(
        run(model, ids, 21), want, rtol=0, atol=TOLERANCE * np.abs(want).max()
    )
    return model


@pytest.mark.parametrize(("bits", "group", "mode"), FORMATS)
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_format(
    bits: int, group: int, mode: str, dtype: str, tmp_path: Path, backend: Any
) -> None:
    """Each mode, width and group size in a whole model, embedding included, on each backend."""
    spec = {"bits": bits, "group_size": group, "mode": mode, "dtype": dtype}
    folder = zoo.write(tmp_path / "m", CASE, **spec)
    model = checked(folder, zoo.tensors(CASE, **spec), Quantization(bits, group, mode))
    assert isinstance(model.model.embed_tokens, Embedding)
    assert not isinstance(model.model.embed_tokens.table, mx.array)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_are_a_little_endian_bit_stream(bits: int) -> None:
    """Code k is bits k*bits .. of its row, straddling words where 32 is no multiple."""
    q = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64)).astype(np.uint8)
    w = pack(q, bits)
    for row, words in zip(q, w, strict=True):
        stream = sum(int(word) << (32 * i) for i, word in enumerate(words))
        assert [stream >> (bits * k) & ((1 << bits) - 1) for k in range(64)] == row.tolist()
    np.testing.assert_array_equal(unpack(w, bits, 64), q)
    w_mlx, s, b = mx.quantize(mx.random.normal((4, 64)), bits=bits, group_size=32)
    want = np.array(mx.dequantize(w_mlx, s, b, bits=bits, group_size=32))
    got = dequantize_ref(np.array(w_mlx), np.array(s), np.array(b), Quantization(bits, 32))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(("bits", "group", "mode"), FORMATS[-3:])
def test_the_reference_of_microscaling(bits: int, group: int, mode: str) -> None:
    """Our float64 reading of the codes is MLX's."""
    w, s = mx.quantize(mx.random.normal((8, 64)) * 3, bits=bits, group_size=group, mode=mode)
    want = np.array(mx.dequantize(w, s, bits=bits, group_size=group, mode=mode, dtype=mx.float32))
    got = dequantize_ref(np.array(w), np.array(s), None, Quantization(bits, group, mode))
    np.testing.assert_array_equal(got, want)


def test_e4m3() -> None:
    assert e4m3(np.array([0x00, 0x38, 0x7E, 0x01, 0xB8], np.uint8)).tolist() == [
        0,
        1,
        448,
        2**-9,
        -1,
    ]
    assert np.isnan(e4m3(np.array([0x7F, 0xFF], np.uint8))).all()


@pytest.mark.parametrize(("bits", "group", "mode"), FORMATS)
def test_shapes_tell_the_format(bits: int, group: int, mode: str) -> None:
    k = 128
    found = infer(k, (5, k * bits // 32), (5, k // group), float_scales=mode == "affine")
    assert found == Quantization(bits, group, mode)


@pytest.mark.parametrize(
    ("k", "w", "scales", "floats", "message"),
    [
        (128, (5, 15), (5, 2), True, "do not hold 128 codes"),
        (128, (5, 16), (5, 3), True, "do not divide 128"),
        (128, (5, 16), (4, 2), True, "w has 5 rows, scales have 4"),
        (128, (5, 28), (5, 2), True, "7 bits are not supported"),
        (128, (5, 16), (5, 8), True, "group size 16 is not supported"),
        (128, (5, 16), (5, 2), False, "no mode has 8-bit scales, 4 bits and groups of 64"),
        (128, (5, 2, 8), (5, 2), True, "two axes"),
    ],
)
def test_shapes_that_tell_none(
    k: int, w: tuple[int, ...], scales: tuple[int, ...], floats: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        infer(k, w, scales, float_scales=floats)


# ---- config.json


def declared(**quantization: Any) -> Declared:
    return Declared(Config({"quantization": quantization}, "config.json"))


def test_a_missing_mode_is_affine() -> None:
    assert declared(bits=4, group_size=32).of("x") == Quantization(4, 32, "affine")


@pytest.mark.parametrize(
    ("entry", "spec"),
    [
        ({"bits": 8}, Quantization(8, 64, "affine")),
        ({"group_size": 128}, Quantization(4, 128, "affine")),
        ({"mode": "affine"}, Quantization(4, 64, "affine")),
        ({"mode": "mxfp4"}, Quantization(4, 32, "mxfp4")),
        ({"mode": "nvfp4"}, Quantization(4, 16, "nvfp4")),
        ({"mode": "mxfp8"}, Quantization(8, 32, "mxfp8")),
    ],
)
def test_an_entry_replaces_the_global_one(entry: dict[str, Any], spec: Quantization) -> None:
    """All of it: what the entry leaves out is its mode's default, not the global value."""
    found = declared(bits=4, group_size=16, mode="nvfp4", **{Q: entry})
    assert found.of(Q) == spec
    assert found.of(DOWN) == Quantization(4, 16, "nvfp4")


def test_entries_that_are_no_modules() -> None:
    """Other keys occur: true means the global entry, unknown values mean nothing."""
    found = declared(
        bits=4,
        group_size=32,
        quant_method="mlx",
        linear_class={"a": 1},
        note=None,
        list=[1, 2],
        number=3.5,
        **{Q: True, DOWN: False, "model.norm": None, "model.embed_tokens": 0},
    )
    assert found.of("model.norm") == found.of("model.embed_tokens") == Quantization(4, 32)
    assert found.of(Q) == Quantization(4, 32)
    assert found.of(DOWN) is False
    assert found.of("linear_class") == Quantization(4, 32)


@pytest.mark.parametrize("key", ["", "language_model."])
@pytest.mark.parametrize("path", ["", "language_model."])
def test_a_prefix_on_either_side(key: str, path: str) -> None:
    found = declared(bits=4, group_size=32, **{key + Q: {"bits": 8, "group_size": 32}})
    assert found.of(path + Q) == Quantization(8, 32)


def test_the_older_name_of_the_dict() -> None:
    """Alone it counts; beside the newer one, where it says the same in most files, it does not."""
    values = {"quantization_config": {"bits": 4, "group_size": 32}}
    assert Declared(Config(values, "config.json")).of(Q) == Quantization(4, 32)
    both = values | {"quantization": {"bits": 8, "group_size": 32}}
    assert Declared(Config(both, "config.json")).of(Q) == Quantization(8, 32)
    assert Declared(Config({}, "config.json")).of(Q) is None


@pytest.mark.parametrize(
    "other",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "mxfp4"},
    ],
)
def test_other_methods_are_named(other: dict[str, Any], tmp_path: Path) -> None:
    """Never a shape error later. Beside MLX's own dict they mean nothing."""

    def edit(config: dict[str, Any], _: Any) -> None:
        config["quantization_config"] = other

    with pytest.raises(CheckpointError, match=f"method '{other['quant_method']}' is not supp"):
        load(zoo.write(tmp_path / "m", CASE, edit=edit))
    load(zoo.write(tmp_path / "n", CASE, bits=4, edit=edit))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"bits": 7}, "7 bits are not supported"),
        ({"group_size": 48}, "group size 48 is not supported"),
        ({"mode": "mxfp4", "bits": 8}, "mxfp4 is 4 bits in groups of 32"),
        ({"mode": "int4"}, "unknown mode 'int4'"),
        ({"bits": "4"}, "bits must be a whole number"),
    ],
)
def test_case_21_impossible_formats(entry: dict[str, Any], message: str) -> None:
    for values in ({"quantization": entry}, {"quantization": {"bits": 4, Q: entry}}):
        with pytest.raises(CheckpointError, match=message):
            Declared(Config(values, "config.json"))


# ---- whole checkpoints


def write(tmp_path: Path, edit: Edit, **options: Any) -> Path:
    return zoo.write(tmp_path / "m", CASE, bits=4, edit=edit, **options)


def requantized(tensors: dict[str, tiny.Stored], path: str, **spec: Any) -> None:
    """Another format for one matrix."""
    for part in (".weight", ".scales", ".biases"):
        tensors.pop(path + part, None)
    n, k = (128, 256) if "down" in path else (128, 128)
    rng = np.random.default_rng(5)
    tensors |= tiny.quantized(rng, path, n, k, dtype="F32", **spec)


def test_every_layer_is_read_off_its_shapes(tmp_path: Path) -> None:
    """Mixed formats without a word in config.json about any."""

    def edit(config: dict[str, Any], tensors: dict[str, tiny.Stored]) -> None:
        del config["quantization"]
        requantized(tensors, DOWN, bits=4, group_size=32, mode="mxfp4")
        requantized(tensors, Q, bits=6, group_size=64, mode="affine")

    model = load(write(tmp_path, edit), dtype="float32").model
    assert model.layers[1].mlp.down_proj.matrix.spec == Quantization(4, 32, "mxfp4")
    first = model.layers[0].self_attn.qkv_proj.parts[0]
    assert first.matrix.spec == Quantization(6, 64)


def test_a_contradiction_names_tensor_and_both_values(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, tiny.Stored]) -> None:
        config["quantization"][DOWN] = {"bits": 8, "group_size": 32}

    message = f"{DOWN}.weight is affine 4-bit, group 32 by its shape, but config.json says "
    with pytest.raises(CheckpointError, match=re.escape(message + "affine 8-bit, group 32")):
        load(write(tmp_path, edit))


@pytest.mark.parametrize("kept", [True, False])
def test_false_keeps_a_layer_dense(kept: bool, tmp_path: Path) -> None:
    """Even if scales exist; and without an entry a layer without scales is dense."""
    values = np.random.default_rng(1).normal(size=(128, 256)) / 16

    def edit(config: dict[str, Any], tensors: dict[str, tiny.Stored]) -> None:
        tensors[f"{DOWN}.weight"] = tiny.stored(values, "F32")
        if kept:
            config["quantization"][DOWN] = False
        else:
            del tensors[f"{DOWN}.scales"], tensors[f"{DOWN}.biases"]

    folder = write(tmp_path, edit)
    tensors = zoo.tensors(CASE, bits=4)
    tensors[f"{DOWN}.weight"] = tiny.stored(values, "F32")
    del tensors[f"{DOWN}.scales"], tensors[f"{DOWN}.biases"]
    model = checked(folder, tensors, Quantization(4, 32))
    assert isinstance(model.model.layers[1].mlp.down_proj, Linear)
    assert isinstance(model.model.layers[0].mlp.down_proj, QuantizedLinear)


def test_a_width_that_no_group_divides_stays_dense(tmp_path: Path) -> None:
    """As mlx_lm.convert leaves it, with no entry; zoo's llama has such widths for groups of 64."""
    ids = zoo.ids_of("llama", 12)
    spec = {"bits": 4, "group_size": 64}
    tensors = zoo.tensors("llama", **spec)
    dense = zoo.tensors("llama")
    for name in [n for n in tensors if n.endswith(".scales")]:
        path = name.removesuffix(".scales")
        if dense[f"{path}.weight"][1].shape[1] % 64:
            tensors[f"{path}.weight"] = dense[f"{path}.weight"]
            del tensors[f"{path}.scales"], tensors[f"{path}.biases"]

    def edit(_: Any, found: dict[str, tiny.Stored]) -> None:
        found.clear()
        found.update(tensors)

    folder = zoo.write(tmp_path / "m", "llama", edit=edit, **spec)
    values = reference.unpacked(tensors, Quantization(4, 64))
    want = reference.logits_of(zoo.config_of("llama"), values, ids, 12)
    model = load(folder, dtype="float32")
    kinds = {type(model.model.layers[0].self_attn.o_proj), type(model.model.lm_head)}
    assert kinds == {Linear, QuantizedLinear}
    got = run(model, ids, 9)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize("bits", [0, 4])
def test_a_tied_model_drops_a_head_that_is_there(bits: int, tmp_path: Path) -> None:
    """lm_head's weight, scales and biases; and every rotary_emb.inv_freq."""
    tensors = zoo.tensors("llama_tied", bits=bits)

    def edit(_: Any, found: dict[str, tiny.Stored]) -> None:
        rng = np.random.default_rng(0)
        if bits:
            spec = {"bits": 4, "group_size": 32, "mode": "affine", "dtype": "F32"}
            found |= tiny.quantized(rng, "lm_head", zoo.VOCAB, 64, **spec)
        else:
            found["lm_head.weight"] = tiny.stored(rng.normal(size=(zoo.VOCAB, 64)), "F32")
        for i in range(3):
            name = f"model.layers.{i}.self_attn.rotary_emb.inv_freq"
            found[name] = tiny.stored(rng.normal(size=8), "F32")

    folder = zoo.write(tmp_path / "m", "llama_tied", bits=bits, edit=edit)
    ids = zoo.ids_of("llama_tied", 12)
    values = reference.unpacked(tensors, Quantization(4, 32))
    want = reference.logits_of(zoo.config_of("llama_tied"), values, ids, 12)
    got = run(load(folder, dtype="float32"), ids, 9)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


def test_without_a_word_a_model_without_a_head_is_tied(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], _: Any) -> None:
        del config["tie_word_embeddings"]

    folder = zoo.write(tmp_path / "m", "llama_tied", edit=edit)
    model = load(folder, dtype="float32").model
    assert mx.array_equal(model.lm_head.weight, model.embed_tokens.table)


def test_missing_unexpected_and_misshaped_are_listed_by_name(tmp_path: Path) -> None:
    def edit(_: Any, tensors: dict[str, tiny.Stored]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.extra.weight"] = tiny.stored(np.zeros(3), "F32")
        tensors["model.layers.1.input_layernorm.weight"] = tiny.stored(np.ones(7), "F32")

    with pytest.raises(CheckpointError) as caught:
        load(write(tmp_path, edit))
    text = str(caught.value)
    assert "model.norm.weight is missing" in text
    assert "model.layers.0.extra.weight is unexpected" in text
    assert "model.layers.1.input_layernorm.weight has shape [7], must be [128]" in text


def test_biases_and_bias_are_two_things(tmp_path: Path) -> None:
    """`biases` shift codes, `bias` is the layer's own: zoo's qwen2 has both."""
    tensors = zoo.tensors("qwen2", bits=4)
    assert {f"{Q}.bias", f"{Q}.biases"} <= set(tensors)
    folder = zoo.write(tmp_path / "m", "qwen2", bits=4)
    ids = zoo.ids_of("qwen2", 12)
    values = reference.unpacked(tensors, Quantization(4, 32))
    want = reference.logits_of(zoo.config_of("qwen2"), values, ids, 12)
    got = run(load(folder, dtype="float32"), ids, 9)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


def test_affine_scales_may_be_negative(tmp_path: Path, backend: Any) -> None:
    """In every model here half of them are; in this one all."""
    tensors = zoo.tensors(CASE, bits=4)
    for name in [n for n in tensors if n.endswith(".scales")]:
        kind, scales = tensors[name]
        assert 0.3 < (scales < 0).mean() < 0.7
        offsets = name.removesuffix("scales") + "biases"
        tensors[offsets] = kind, tensors[offsets][1] * -np.sign(scales)
        tensors[name] = kind, -np.abs(scales)

    def edit(_: Any, found: dict[str, tiny.Stored]) -> None:
        found.update(tensors)

    checked(write(tmp_path, edit), tensors, Quantization(4, 32))


@pytest.mark.parametrize("case", ["llama", "gemma2", "mixtral", "olmo2", "cohere2", "granite"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [0, 4])
def test_case_04_nothing_becomes_float32(
    case: str, dtype: str, bits: int, tmp_path: Path, backend: Any
) -> None:
    """Scales or dense weights in the other 16-bit type: hidden states, cache and logits stay."""
    other = "BF16" if dtype == "float16" else "F16"
    model = load(zoo.write(tmp_path / "m", case, bits=bits, dtype=other), dtype=dtype)
    want = mx.bfloat16 if case == "gemma2" else {"float16": mx.float16}.get(dtype, mx.bfloat16)
    for length in (1, 12):
        cache = model.new_cache(16)
        hidden = model.model(mx.array(zoo.ids_of(case, length), mx.int32), cache)
        types = {hidden.dtype, cache.keys[0].dtype, model.model.logits(hidden).dtype}
        assert types == {want}


def test_gemma_leaves_the_range_of_float16(tmp_path: Path) -> None:
    """A residual stream of 1e5: bfloat16 holds it, float16 is not used, and it is said."""

    def edit(_: Any, tensors: dict[str, tiny.Stored]) -> None:
        for i in range(3):
            name = f"model.layers.{i}.post_feedforward_layernorm.weight"
            tensors[name] = tiny.stored(np.full(64, 60000.0), "F16")

    folder = zoo.write(tmp_path / "m", "gemma2", bits=4, dtype="F16", edit=edit)
    model = load(folder, dtype="float16")
    assert model.dtype == mx.bfloat16
    assert any("bfloat16" in note for note in model.notes)
    hidden = model.model(mx.array(zoo.ids_of("gemma2", 9), mx.int32), model.new_cache(9))
    assert mx.abs(hidden).max().item() > 65504
    assert mx.isfinite(model.model.logits(hidden)).all()


def test_what_runs_slower_is_said(tmp_path: Path, backend: Any) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, tiny.Stored]) -> None:
        requantized(tensors, Q, bits=6, group_size=64, mode="affine")
        config["quantization"][Q] = {"bits": 6, "group_size": 64}

    notes = load(write(tmp_path, edit), dtype="float32").notes
    assert any("model.layers.0.self_attn.{q_proj,k_proj,v_proj}: formats" in n for n in notes)


def test_experts_of_several_formats_are_refused_by_name(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, tiny.Stored]) -> None:
        path = "model.layers.0.block_sparse_moe.experts.1.w1"
        del config["quantization"]
        rng = np.random.default_rng(5)
        spec = {"bits": 8, "group_size": 32, "mode": "affine", "dtype": "F32"}
        tensors |= tiny.quantized(rng, path, 96, 64, **spec)

    with pytest.raises(CheckpointError, match=r"experts\.\*\.w1: experts of several formats"):
        load(zoo.write(tmp_path / "m", "mixtral", bits=4, edit=edit))


@pytest.mark.parametrize(("bits", "group", "mode"), FORMATS)
def test_experts_in_every_format(bits: int, group: int, mode: str, tmp_path: Path) -> None:
    """Mixtures go another way than plain products; groups that do not divide 96 are left out."""
    if 96 % group:
        pytest.skip("the experts' width is 96")
    spec = {"bits": bits, "group_size": group, "mode": mode}
    folder = zoo.write(tmp_path / "m", "mixtral", stacked=True, **spec)
    tensors = zoo.tensors("mixtral", stacked=True, **spec)
    values = reference.unpacked(tensors, Quantization(bits, group, mode))
    ids = zoo.ids_of("mixtral", 12)
    want = reference.logits_of(zoo.config_of("mixtral"), values, ids, 12)
    got = run(load(folder, dtype="float32"), ids, 9)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())
