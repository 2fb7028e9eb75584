"""qrun inspect: what it finds in headers alone, and every problem with its remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrun.inspect import Report, inspect
from qrun.loader import load
from tests import tiny, zoo
from tests.reference_model import read_safetensors

INDEX = "model.safetensors.index.json"


def only(report: Report) -> str:
    """The one problem's text; it has a remedy, and the exit code says so."""
    assert [p.text for p in report.problems] == [report.problems[0].text]
    assert report.problems[0].remedy
    assert report.exit_code == 4
    return report.problems[0].text


def test_a_good_model(tmp_path: Path) -> None:
    folder = tiny.tiny(tmp_path / "m", "qwen2", bits=4, tied=False)
    report = inspect(folder, length=100)
    assert report.loads
    assert report.exit_code == 0
    assert report.architecture == "qwen2"
    assert report.context == 512
    assert report.template == "tokenizer_config.json"
    assert report.stop_tokens == sorted(load(folder).eos)
    kinds = {kind.name: kind for kind in report.kinds}
    q = kinds["q_proj"]
    assert (q.count, q.parameters, q.formats) == (2, 2 * 128 * 128, {"affine 4-bit, group 32": 2})
    assert q.bits == 5.0  # 4, and 32 of scale and offset for 32 weights
    assert kinds["lm_head"].parameters == tiny.VOCAB * 128
    assert kinds["norms and biases"].parameters == 5 * 128 + 2 * (128 + 64 + 64)
    assert report.cache_bytes == 2 * 100 * 4 * 2 * 2 * 32
    arrays = read_safetensors(folder / "model.safetensors")
    whole = sum(a.nbytes for a in arrays.values())
    assert report.weight_bytes == whole
    embedding = sum(a.nbytes for n, a in arrays.items() if "embed_tokens" in n)
    assert report.step_bytes == pytest.approx(whole - embedding, abs=embedding / tiny.VOCAB + 1)
    assert report.step_bytes == load(folder).step_bytes


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "gemma3_text", "cohere2", "phi3"])
def test_parameters_are_counted_right(case: str, tmp_path: Path) -> None:
    """Quantized or not, experts stacked or listed: the same number, that of the shapes."""
    want = sum(int(np.prod(shape)) for _, shape, _ in zoo.shapes(zoo.config_of(case)))
    for name, options in {"a": {}, "b": {"bits": 4}, "c": {"bits": 4, "stacked": True}}.items():
        assert inspect(zoo.write(tmp_path / name, case, **options)).parameters == want


def test_a_step_of_a_mixture_reads_the_chosen_experts(tmp_path: Path) -> None:
    report = inspect(zoo.write(tmp_path / "m", "mixtral", bits=4))
    experts = sum(kind.nbytes for kind in report.kinds if kind.name.startswith("experts."))
    embedding = next(kind.nbytes for kind in report.kinds if kind.name == "embed_tokens")
    idle = experts / 2 + embedding * (1 - 1 / zoo.VOCAB)
    assert report.step_bytes == pytest.approx(report.weight_bytes - idle, abs=1)


def test_no_weight_is_read(tmp_path: Path, python: Callable[..., str]) -> None:
    """A checkpoint of 16 GB that has only headers: a second, and little memory."""
    config = zoo.config_of("llama") | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 128256,
    }
    header: dict[str, Any] = {}
    end = 0
    for name, shape, _ in zoo.shapes(config):
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    tiny.write_json(tmp_path / "config.json", config)
    tiny.byte_level().save(str(tmp_path / "tokenizer.json"))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    code = (
        "import sys, qrun.inspect as i, qrun.hardware as h; r = i.inspect(sys.argv[1]);"
        "print(r.loads, r.parameters, h.peak_memory() >> 10)"
    )
    loads, parameters, kilobytes = python(code, tmp_path).split()
    assert loads == "True"
    assert parameters == "8030261248"
    assert int(kilobytes) < 600_000


# ---- problems


def test_every_misfit_at_once(tmp_path: Path) -> None:
    def edit(_: Any, tensors: dict[str, tiny.Stored]) -> None:
        for i in range(3):
            del tensors[f"model.layers.{i}.mlp.up_proj.weight"]
        for i in range(20):
            tensors[f"stray.{i}"] = tiny.stored(np.zeros(3), "F32")

    report = inspect(zoo.write(tmp_path / "m", "llama", edit=edit))
    assert len(report.problems) == 23
    assert report.exit_code == 4
    assert "model.layers.2.mlp.up_proj.weight is missing" in {p.text for p in report.problems}


def test_several_broken_files_at_once(tmp_path: Path) -> None:
    folder = zoo.write(tmp_path / "m", "llama", shards=3)
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"")
    (folder / "model-00002-of-00003.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    )
    report = inspect(folder)
    assert [p.remedy for p in report.problems] == ["download the file again", "run: git lfs pull"]


def test_index_against_disk(tmp_path: Path) -> None:
    folder = zoo.write(tmp_path / "m", "llama", shards=3)
    (folder / "model-00003-of-00003.safetensors").unlink()
    assert "model-00003-of-00003.safetensors is missing" in only(inspect(folder))
    folder = zoo.write(tmp_path / "n", "llama", shards=2)
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"x" * 20)
    assert "is not named in" in only_first(inspect(folder))
    folder = zoo.write(tmp_path / "o", "llama", shards=2)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    tiny.write_json(folder / INDEX, index)
    assert "omits it" in only(inspect(folder))


def only_first(report: Report) -> str:
    assert report.exit_code == 4
    return report.problems[0].text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "architecture 't5' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"rope_scaling": {"type": "su2"}}, "rope type 'su2' is not supported"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq' is not supported"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings must be a whole number"),
    ],
)
def test_config_problems(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    def edit(config: dict[str, Any], _: Any) -> None:
        config |= change

    text = only_first(inspect(zoo.write(tmp_path / "m", "llama", edit=edit)))
    assert message in text


def test_tokenizer_and_template(tmp_path: Path) -> None:
    folder = zoo.write(tmp_path / "m", "llama")
    report = inspect(folder)
    assert report.template.startswith("none")
    assert any("no stop token" in note for note in report.notes)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only pairs') }}")
    report = inspect(folder)
    assert report.template == "chat_template.jinja"
    assert any("only pairs" in note for note in report.notes)
    assert report.loads
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"x")
    assert "has only tokenizer.model" in only(inspect(folder))


def test_notes_on_slower_layers(tmp_path: Path) -> None:
    def edit(_: Any, tensors: dict[str, tiny.Stored]) -> None:
        path = "model.layers.1.mlp.down_proj"
        del tensors[f"{path}.scales"], tensors[f"{path}.biases"]
        tensors[f"{path}.weight"] = tiny.stored(np.zeros((64, 96)), "F16")

    report = inspect(zoo.write(tmp_path / "m", "llama", bits=4, edit=edit))
    assert report.loads
    assert any(n.startswith("model.layers.1.mlp.down_proj: not quantized") for n in report.notes)
    down = next(kind for kind in report.kinds if kind.name == "down_proj")
    assert down.formats == {"affine 4-bit, group 32": 2, "float16": 1}


# ---- the command


def test_command(tmp_path: Path, cli: Callable[..., Any]) -> None:
    folder = tiny.tiny(tmp_path / "m")
    done = cli("inspect", folder, "-c", 64)
    assert (done.code, done.err) == (0, "")
    text = done.out.decode()
    assert "architecture  llama" in text
    assert "64 positions" in text
    assert text.endswith("It would load.\n")
    done = cli("inspect", folder, "--json")
    found = json.loads(done.out)
    assert found["loads"] is True
    assert found["context"] == found["length"] == 512
    assert {"name", "count", "parameters", "nbytes", "formats", "bits"} == set(found["kinds"][0])


def test_command_on_a_broken_folder(tmp_path: Path, cli: Callable[..., Any]) -> None:
    folder = tiny.tiny(tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    done = cli("inspect", folder)
    assert done.code == 4
    assert "is truncated" in done.out.decode()
    assert "remedy      download the file again" in done.out.decode()
    done = cli("inspect", folder, "--json")
    assert done.code == 4
    assert json.loads(done.out)["problems"][0]["remedy"] == "download the file again"
    assert cli("inspect", tmp_path / "nothing").code == 3


def test_more_positions_than_the_model_was_made_for(tiny_folder: Path) -> None:
    report = inspect(tiny_folder)
    assert not any("was made for" in note for note in report.notes)
    longer = inspect(tiny_folder, length=report.context + 1)
    assert f"more than the {report.context} that the model was made for" in " ".join(longer.notes)
    assert longer.loads
