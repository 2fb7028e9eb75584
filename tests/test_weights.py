"""Tensors against config.json: what is missing, left over, mis-shaped or contradicted is named."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.errors import CheckpointError
from qrun.generation import generate
from qrun.layers import Linear, QuantizedLinear
from qrun.loader import load
from tests import zoo
from tests.tiny import Stored, stored, tiny

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def fault(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Stored]) -> None:
        del tensors["model.norm.weight"], tensors[f"{DOWN}.biases"]

    line = fault(tiny(tmp_path, edit=edit))
    assert "model.norm.weight is missing" in line
    assert f"{DOWN}.biases is missing" in line


def test_a_missing_packed_weight_is_named(tmp_path: Path) -> None:
    line = fault(tiny(tmp_path, edit=lambda t: t.pop(f"{Q}.weight")))
    assert f"{Q}.weight is missing" in line
    assert "unexpected" not in line


@pytest.mark.parametrize("gone", ["model.layers.1.", "model.layers.0.mlp.", "model."])
def test_what_is_missing_whole_is_one_problem(tmp_path: Path, gone: str) -> None:
    def edit(tensors: dict[str, Stored]) -> None:
        for name in [name for name in tensors if name.startswith(gone)]:
            del tensors[name]

    line = fault(tiny(tmp_path, edit=edit))
    assert f"{gone}* is missing, all of it" in line
    assert line.count(" is missing") == 1


def test_what_is_missing_whole_has_an_end(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Stored]) -> None:
        config["num_local_experts"] = 10**6
        for name in [name for name in tensors if name.startswith("model.layers.")]:
            del tensors[name]

    began = time.perf_counter()
    assert "model.layers.0.* is missing, all of it" in fault(
        zoo.write(tmp_path / "m", "mixtral", bits=4, edit=edit)
    )
    assert time.perf_counter() - began < 5


def test_a_layer_too_many_is_one_problem(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Stored]) -> None:
        tensors |= {n.replace("s.1.", "s.2."): t for n, t in tensors.items() if ".layers.1." in n}

    line = fault(tiny(tmp_path, edit=edit))
    assert "model.layers.2.* is unexpected" in line
    assert line.count(" is unexpected") == 1


def test_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    extra = stored(np.zeros(4), "F16")
    line = fault(tiny(tmp_path, edit=lambda t: t.update({"model.extra.weight": extra})))
    assert "model.extra.weight is unexpected" in line


def test_a_layer_more_than_the_config_says_is_unexpected(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Stored]) -> None:
        tensors["model.layers.2.input_layernorm.weight"] = stored(np.ones(128), "F16")

    assert "model.layers.2.input_layernorm.weight is unexpected" in fault(tiny(tmp_path, edit=edit))


def test_mis_shaped_tensors_tell_both_shapes(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Stored]) -> None:
        tensors["model.norm.weight"] = stored(np.ones(127), "F16")

    line = fault(tiny(tmp_path, edit=edit))
    assert "model.norm.weight has shape [127], must be [128]" in line


def test_many_problems_are_cut_with_a_count(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Stored]) -> None:
        for i in range(30):
            tensors[f"stray.{i:02}"] = stored(np.zeros(1), "F16")

    assert "; and 22 more" in fault(tiny(tmp_path, edit=edit))


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_head.scales", "lm_head.biases"])
def test_a_tied_model_may_ship_a_head(name: str, tmp_path: Path) -> None:
    """All three parts are dropped, whatever they hold."""
    folder = tiny(tmp_path, edit=lambda t: t.update({name: stored(np.zeros((3, 3)), "F16")}))
    plain = tiny(tmp_path / "plain")
    ids = [1, 2, 3]
    assert generate(load(folder), ids, max_tokens=8).tokens == (
        generate(load(plain), ids, max_tokens=8).tokens
    )


def test_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(tiny(tmp_path, edit=lambda t: t.update({name: stored(np.zeros(16), "F32")})))


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"bits": 8, "group_size": 32}, "affine 8-bit, group 32"),
        ({"bits": 4, "group_size": 64}, "affine 4-bit, group 64"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "mxfp4 4-bit, group 32"),
        ({}, "affine 4-bit, group 64"),  # missing numbers mean the mode's defaults
    ],
)
def test_case_12_shapes_that_contradict_the_config_name_both(
    declared: dict[str, Any], said: str, tmp_path: Path
) -> None:
    spec = {"group_size": 32, "bits": 4}
    entry = {Q: declared or {"mode": "affine"}}
    line = fault(tiny(tmp_path, config={"quantization": {**spec, **entry}}))
    assert f"{Q}.weight is affine 4-bit, group 32 by its shape, but config.json says {said}" in line


def forms(folder: Path) -> Any:
    return load(folder).model


def test_case_12_an_entry_of_false_keeps_a_layer_dense(tmp_path: Path) -> None:
    """False wins even over scales that are there."""
    spec = {"group_size": 32, "bits": 4, DOWN: False}

    def edit(tensors: dict[str, Stored]) -> None:
        tensors[f"{DOWN}.weight"] = stored(np.full((128, 256), 0.5), "F16")

    model = forms(tiny(tmp_path, config={"quantization": spec}, edit=edit))
    down = model.layers[1].mlp.down_proj
    assert isinstance(down, Linear)
    assert (np.array(down.weight) == 0.5).all()
    assert isinstance(model.layers[0].mlp.down_proj, QuantizedLinear)


@pytest.mark.parametrize(
    "extra",
    [
        {Q: True},
        {f"language_model.{Q}": {"group_size": 32, "bits": 4}},
        {"linear_class": "Linear", "version": 3, "notes": None, "nested": {"x": 1}},
    ],
)
def test_case_12_other_keys_of_the_quantization_entry(
    extra: dict[str, Any], tmp_path: Path
) -> None:
    spec = {"group_size": 32, "bits": 4, **extra}
    model = forms(tiny(tmp_path, config={"quantization": spec}))
    assert isinstance(model.layers[0].self_attn.qkv_proj, QuantizedLinear)


def test_quantization_config_alone_is_enough(tmp_path: Path) -> None:
    spec = {"group_size": 32, "bits": 4}
    config = {"quantization": None, "quantization_config": spec}
    assert isinstance(forms(tiny(tmp_path, config=config)).embed_tokens.table.n, int)


def test_no_entry_at_all_shapes_are_the_truth(tmp_path: Path) -> None:
    model = forms(tiny(tmp_path, bits=6, config={"quantization": None}))
    assert model.layers[0].mlp.down_proj.matrix.spec.bits == 6


def test_layers_whose_width_no_group_divides_stay_dense(tmp_path: Path) -> None:
    folder = tiny(tmp_path, group_size=64, config={"intermediate_size": 160})
    model = forms(folder)
    assert isinstance(model.layers[0].mlp.down_proj, Linear)
    assert isinstance(model.layers[0].mlp.gate_up_proj, QuantizedLinear)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "bitsandbytes", "fp8"])
def test_case_21_other_methods_are_named(method: str, tmp_path: Path) -> None:
    config = {"quantization": None, "quantization_config": {"quant_method": method, "bits": 4}}
    line = fault(tiny(tmp_path, config=config))
    assert f"quantization method {method!r} is not supported" in line


def test_case_21_bits_and_groups_of_another_method_are_not_ours(tmp_path: Path) -> None:
    other = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    line = fault(tiny(tmp_path, config={"quantization": None, "quantization_config": other}))
    assert "quantization method 'gptq' is not supported" in line


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"bits": 7, "group_size": 32}, "7 bits are not supported"),
        ({"bits": 4, "group_size": 48}, "group size 48 is not supported"),
        ({"bits": 4, "group_size": 32, "mode": "fancy"}, "unknown mode 'fancy'"),
        ({"bits": "4", "group_size": 32}, "bits must be a whole number"),
        ({"bits": 8, "group_size": 32, "mode": "mxfp4"}, "mxfp4 is 4 bits in groups of 32"),
    ],
)
def test_case_21_unsupported_formats_are_named(
    entry: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in fault(tiny(tmp_path, config={"quantization": entry}))


def test_packed_weights_of_another_type_are_named(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Stored]) -> None:
        tensors[f"{Q}.weight"] = stored(np.zeros((128, 16)), "F32")

    assert f"{Q}.weight is of type F32, must be U32" in fault(tiny(tmp_path, edit=edit))


@pytest.mark.parametrize(("part", "rows"), [("weight", 127), ("scales", 127), ("biases", 127)])
def test_rows_of_the_three_parts_must_agree(part: str, rows: int, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Stored]) -> None:
        kind, array = tensors[f"{Q}.{part}"]
        tensors[f"{Q}.{part}"] = kind, array[:rows]

    line = fault(tiny(tmp_path, edit=edit))
    assert Q in line
    assert "127" in line


def test_scales_and_biases_of_two_types_are_named(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Stored]) -> None:
        tensors[f"{Q}.biases"] = stored(tensors[f"{Q}.biases"][1], "F32")

    line = fault(tiny(tmp_path, edit=edit))
    assert f"{Q}.biases is float32, but scales are float16" in line


def test_a_packed_matrix_is_held_once(tmp_path: Path) -> None:
    """Either as the file has it, or as the backend packed it; the other is gone."""
    model = forms(tiny(tmp_path))
    for matrix in (model.layers[0].mlp.down_proj.matrix, model.embed_tokens.table):
        file_form = [a for a in (matrix.w, matrix.scales, matrix.biases) if a is not None]
        assert len(file_form) == (0 if matrix.packed is not None else 3)
    assert model.lm_head.matrix is model.embed_tokens.table
    assert isinstance(model.norm.weight, mx.array)
