"""Checkpoints broken in every way that is known: one line each, a remedy, the right exit code.

`qrun inspect`, `qrun inspect --json` and `qrun generate` must agree on all of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Run
from tests.tiny import stored, tiny, write_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "download the file again"
MISFIT = "config.json and weights are not of one model"
UPDATE = "update qrun"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
HTML = b"<!DOCTYPE html>\n<html>"
NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj"
FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"

NAN = float("nan")  # json writes it as NaN, and reads it

Break = Callable[[Path], object]


def content(name: str, data: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(data)


def gone(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def renamed(name: str, new: str) -> Break:
    return lambda folder: (folder / name).rename(folder / new)


def shorter(name: str, by: int) -> Break:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-by])


def copied(name: str, new: str) -> Break:
    return lambda folder: shutil.copy(folder / name, folder / new)


def config(**changes: Any) -> Break:
    def change(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | changes
        write_json(folder / "config.json", {k: v for k, v in values.items() if v is not None})

    return change


def index(change: Callable[[dict[str, Any]], object]) -> Break:
    def apply(folder: Path) -> None:
        values = json.loads((folder / INDEX).read_text())
        change(values["weight_map"])
        write_json(folder / INDEX, values)

    return apply


def template(value: Any) -> Break:
    return lambda folder: write_json(folder / "tokenizer_config.json", {"chat_template": value})


def as_folder(name: str) -> Break:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def pipe(name: str) -> Break:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def device(name: str) -> Break:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/zero")

    return change


def dangling(name: str, target: str = "no blob") -> Break:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder / target)

    return change


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def packed_as(kind: str) -> Callable[[dict[str, Any]], object]:
    def edit(tensors: dict[str, Any]) -> None:
        values = tensors[f"{DOWN}.weight"][1]
        tensors[f"{DOWN}.weight"] = kind, values.astype(np.int32)

    return edit


def norm(kind: str, values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({NORM: (kind, values)})


# name -> how a good folder is broken, what is said, the remedy; sharded ones have three files
SHARDED: dict[str, tuple[Break, str, str]] = {
    "shard missing": (gone(SECOND), f"{SECOND} is missing, {INDEX} names it", AGAIN),
    "shard cut": (shorter(SECOND, 100), f"{SECOND} is truncated", AGAIN),
    "shard one byte short": (shorter(SECOND, 1), f"{SECOND} is truncated", AGAIN),
    "shard empty": (content(SECOND, b""), f"{SECOND} is empty", AGAIN),
    "shard lfs": (content(SECOND, LFS), f"{SECOND} is a git-lfs pointer", "git lfs pull"),
    "shard html": (content(SECOND, HTML), f"{SECOND} is a web page", AGAIN),
    "index missing": (gone(INDEX), f"but no {INDEX}", f"download {INDEX} again"),
    "index a folder": (as_folder(INDEX), f"{INDEX} is a folder, not a file", AGAIN),
    "shard a folder": (as_folder(SECOND), f"{SECOND} is a folder, not a file", AGAIN),
    "index a pipe": (pipe(INDEX), f"{INDEX} is a pipe, not a file", AGAIN),
    "shard a pipe": (pipe(SECOND), f"{SECOND} is a pipe, not a file", AGAIN),
    "index lfs": (content(INDEX, LFS), f"{INDEX} is a git-lfs pointer", "git lfs pull"),
    "index empty": (content(INDEX, b""), f"{INDEX} is empty", AGAIN),
    "index without a map": (content(INDEX, b"{}"), "weight_map is missing or empty", AGAIN),
    "index names a ghost": (
        index(lambda m: m.update(ghost=FIRST)),
        f"{FIRST} does not hold ghost",
        "download both again",
    ),
    "index omits a tensor": (index(lambda m: m.pop(NORM)), f"{INDEX} omits it", "both again"),
    "index says another shard": (
        index(lambda m: m.update({NORM: FIRST})),
        f"{INDEX} says {FIRST}",
        "both again",
    ),
    "index points outside": (
        index(lambda m: m.update({NORM: "../x.safetensors"})),
        "points to '../x.safetensors', not to a weight file",
        AGAIN,
    ),
    "stray file": (copied(FIRST, SINGLE), f"{SINGLE} is not named in", "two checkpoints"),
}
WHOLE: dict[str, tuple[Break, str, str]] = {
    "index of another": (
        content(INDEX, b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        "model-00001-of-00002.safetensors is missing",
        f"delete {INDEX}",
    ),
    "no weights": (gone(SINGLE), f"has no {SINGLE}: the download is incomplete", AGAIN),
    "pytorch": (renamed(SINGLE, "pytorch_model.bin"), "only pytorch_model.bin", "qrun reads"),
    "npz": (renamed(SINGLE, "weights.npz"), "only weights.npz", "qrun reads"),
    "adapter": (renamed(SINGLE, "adapters.safetensors"), "only adapters.saf", "qrun reads"),
    "gguf inside": (renamed(SINGLE, "m.gguf"), "only m.gguf", "qrun convert "),
    "weights of zeros": (content(SINGLE, bytes(5000)), f"{SINGLE} has a broken header", AGAIN),
    "header too long": (
        content(SINGLE, (1 << 40).to_bytes(8, "little") + b"{}"),
        "its header would take 1099511627776 bytes",
        AGAIN,
    ),
    "weights a folder": (as_folder(SINGLE), f"{SINGLE} is a folder, not a file", AGAIN),
    "weights a pipe": (pipe(SINGLE), f"{SINGLE} is a pipe, not a file", AGAIN),
    "weights a device": (device(SINGLE), f"{SINGLE} is a device, not a file", AGAIN),
    "config a pipe": (pipe("config.json"), "config.json is a pipe", AGAIN),
    "tokenizer a pipe": (pipe("tokenizer.json"), "tokenizer.json is a pipe", AGAIN),
    "tokenizer a device": (device("tokenizer.json"), "tokenizer.json is a device", AGAIN),
    "template a pipe": (pipe("chat_template.jinja"), "chat_template.jinja is a pipe", AGAIN),
    "tokenizer config a pipe": (
        pipe("tokenizer_config.json"),
        "tokenizer_config.json is a pipe",
        AGAIN,
    ),
    "link to itself": (dangling(SINGLE, SINGLE), f"{SINGLE} is a broken link", AGAIN),
    "blob missing": (dangling(SINGLE), f"{SINGLE} is a broken link", AGAIN),
    "blob of the template missing": (
        dangling("chat_template.jinja"),
        "chat_template.jinja is a broken link",
        AGAIN,
    ),
    "blob of the tokenizer config missing": (
        dangling("tokenizer_config.json"),
        "tokenizer_config.json is a broken link",
        AGAIN,
    ),
    "blob of the tokenizer missing": (
        dangling("tokenizer.json"),
        "tokenizer.json is a broken link",
        AGAIN,
    ),
    "blob of the config missing": (
        dangling("config.json"),
        "config.json is a broken link",
        AGAIN,
    ),
    "config missing": (gone("config.json"), "config.json is missing", "a model's folder"),
    "config empty": (content("config.json", b""), "config.json is empty", AGAIN),
    "config lfs": (content("config.json", LFS), "is a git-lfs pointer", "git lfs pull"),
    "config html": (content("config.json", HTML), "config.json is a web page", AGAIN),
    "config broken": (content("config.json", b"{,"), "config.json is not valid JSON", AGAIN),
    "config a list": (content("config.json", b"[]"), "must hold a JSON object", AGAIN),
    "config not UTF-8": (content("config.json", b"\xff{}"), "config.json cannot be read", AGAIN),
    "config a folder": (as_folder("config.json"), "config.json is a folder, not a", AGAIN),
    "tokenizer a folder": (as_folder("tokenizer.json"), "tokenizer.json is a folder", AGAIN),
    "template a folder": (as_folder("chat_template.jinja"), "template.jinja is a folder", AGAIN),
    "tokenizer config a folder": (
        as_folder("tokenizer_config.json"),
        "tokenizer_config.json is a folder",
        AGAIN,
    ),
    "no model_type": (config(model_type=None), "model_type is missing", AGAIN),
    "architecture": (config(model_type="t5"), "architecture 't5' is not supported", UPDATE),
    "rope type": (config(rope_scaling={"type": "su2"}), "rope type 'su2' is not", UPDATE),
    "rope without factor": (config(rope_scaling={"type": "linear"}), "factor is missing", AGAIN),
    "activation": (config(hidden_act="relu"), "hidden_act is 'relu'", UPDATE),
    "hidden size": (config(hidden_size=256), "by its shape, but config.json says", MISFIT),
    "a string for a number": (config(hidden_size="128"), "must be a whole number", AGAIN),
    "too many layers": (config(num_hidden_layers=3), "model.layers.2.* is missing, all", MISFIT),
    "too few layers": (config(num_hidden_layers=1), "layers.1.* is unexpected", MISFIT),
    "vocabulary": (config(vocab_size=100), "has shape [352, 16], must be [100, 16]", MISFIT),
    "heads": (config(num_attention_heads=3), "no multiple of", "download config.json again"),
    "context without end": (
        config(max_position_embeddings=10**12),
        "max_position_embeddings must be a whole number, 1 to 2147483647, but is 1000000000000",
        AGAIN,
    ),
    "layers without end": (config(num_hidden_layers=10**9), "a whole number, 1 to 10000", AGAIN),
    "vocabulary without end": (config(vocab_size=10**12), "vocab_size must be a whole", AGAIN),
    "rows without end": (config(intermediate_size=2**31 - 1), "has 4294967294 rows", MISFIT),
    "hidden without end": (config(hidden_size=10**9), "hidden_size must be a whole number", AGAIN),
    "heads without end": (
        config(hidden_size=1 << 20, num_attention_heads=2, num_key_value_heads=2, head_dim=None),
        "hidden_size 1048576 in 2 heads: heads have 65536 at most",
        "config.json",
    ),
    "context": (config(max_position_embeddings=0), "max_position_embeddings must be", AGAIN),
    "no such epsilon": (
        config(rms_norm_eps=-1),
        "rms_norm_eps must be a finite number, 0 or more, but is -1",
        AGAIN,
    ),
    "epsilon too large": (
        config(rms_norm_eps=1e39),
        "rms_norm_eps must be a finite number, 0 to 1e+30, but is 1e+39",
        AGAIN,
    ),
    "epsilon no number": (config(rms_norm_eps=NAN), "0 or more, but is nan", AGAIN),
    "theta": (config(rope_theta=0), "rope_theta must be a finite number, 1e-30 or", AGAIN),
    "theta too large": (config(rope_theta=1e39), "a finite number, 1e-30 to 1e+30, but", AGAIN),
    "theta no number": (config(rope_theta=NAN), "rope_theta must be a finite number", AGAIN),
    "no dims": (config(head_dim=0), "head_dim must be a whole number, 1 to 65536", AGAIN),
    "no vocabulary": (config(vocab_size=0), "vocab_size must be a whole number, 1", AGAIN),
    "window": (config(sliding_window=-1), "sliding_window must be a whole number, 0", AGAIN),
    "bits": (
        config(quantization={"bits": 8, "group_size": 32}),
        "is affine 4-bit, group 32 by its shape, but config.json says affine 8-bit, group 32",
        MISFIT,
    ),
    "seven bits": (config(quantization={"bits": 7}), "7 bits are not supported", UPDATE),
    "mode": (config(quantization={"mode": "int4"}), "unknown mode 'int4'", UPDATE),
    "awq": (
        config(quantization=None, quantization_config={"quant_method": "awq"}),
        "quantization method 'awq' is not supported",
        "qrun reads MLX's formats",
    ),
    "tokenizer missing": (gone("tokenizer.json"), "has no tokenizer", "download tokenizer.json"),
    "tokenizer.model": (
        renamed("tokenizer.json", "tokenizer.model"),
        "has only tokenizer.model",
        "convert it with transformers",
    ),
    "tokenizer cut": (content("tokenizer.json", b'{"model":'), "cannot be used: EOF", AGAIN),
    "tokenizer lfs": (content("tokenizer.json", LFS), "is a git-lfs pointer", "git lfs pull"),
    "tokenizer config": (content("tokenizer_config.json", b"{"), "is not valid JSON", AGAIN),
    "template of no kind": (template(7), "chat_template has no usable default", "give it one"),
    "template without default": (template([{"name": "a", "template": "b"}]), "default", "give"),
    "template lfs": (content("chat_template.jinja", LFS), "is a git-lfs pointer", "lfs pull"),
    "template empty": (content("chat_template.jinja", b""), "chat_template.jinja is empty", AGAIN),
    "template not UTF-8": (content("chat_template.jinja", b"\xff"), "cannot be read", AGAIN),
    "stop token": (config(eos_token_id="x"), "eos_token_id must be a whole number", AGAIN),
    "nothing": (emptied, "has no model.safetensors", AGAIN),
}
TENSORS: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "tensor missing": (lambda t: t.pop(NORM), f"{NORM} is missing", MISFIT),
    "scales missing": (
        lambda t: t.pop(f"{DOWN}.scales"),
        f"{DOWN}.scales is missing",
        MISFIT,
    ),
    "tensor too many": (
        lambda t: t.update({"a.b": stored(np.zeros(3), "F16")}),
        "a.b is unexpected",
        MISFIT,
    ),
    "tensor of another shape": (
        norm("F32", np.zeros(3, np.float32)),
        f"{NORM} has shape [3]",
        MISFIT,
    ),
    "tensor of another type": (
        norm("F64", np.zeros(128)),
        "has unsupported type F64",
        "qrun reads F32",
    ),
    "codes of another type": (packed_as("I32"), f"{DOWN}.weight is of type I32", MISFIT),
}


def agree(folder: Path, command: Run, said: str, remedy: str) -> None:
    found = command("inspect", folder, "--json")
    assert found.code == 4
    report = json.loads(found.out)
    assert report["loads"] is False
    assert said in report["problems"][0]["text"]
    assert remedy in report["problems"][0]["remedy"]
    assert all(p["text"] and p["remedy"] and "\n" not in p["text"] for p in report["problems"])
    assert found.err == ""
    told = command("inspect", folder)
    assert told.code == 4
    text = told.out.decode()
    assert said in text.replace("layers.*", "layers.0").replace("layers.0.input", "layers.2.input")
    assert f"  remedy      {report['problems'][0]['remedy']}\n" in text
    assert text.endswith("It would not load.\n")
    ran = command("generate", folder, "-p", "x", "-n", "1")
    assert (ran.code, ran.out) == (4, b"")
    lines = ran.err.splitlines()
    assert lines[0].startswith("qrun: error: ")
    assert [line.startswith("  hint: ") for line in lines[1:]] in ([True], [])


@pytest.mark.parametrize("kind", SHARDED)
def test_sharded(kind: str, tmp_path: Path, command: Run) -> None:
    broken, said, remedy = SHARDED[kind]
    broken(tiny(tmp_path, shards=3))
    agree(tmp_path, command, said, remedy)


@pytest.mark.parametrize("kind", WHOLE)
def test_in_one_file(kind: str, tmp_path: Path, command: Run) -> None:
    broken, said, remedy = WHOLE[kind]
    broken(tiny(tmp_path))
    agree(tmp_path, command, said, remedy)


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors(kind: str, tmp_path: Path, command: Run) -> None:
    edit, said, remedy = TENSORS[kind]
    agree(tiny(tmp_path, edit=edit), command, said, remedy)


@pytest.mark.parametrize(
    ("name", "said", "remedy"),
    [
        ("m.gguf", "m.gguf is a file, not a model folder", "convert it: qrun convert"),
        ("model.safetensors", "is a file, not a model folder", "give its folder: "),
        ("nowhere/at/all", "no such folder", "give a model folder, or a hub id"),
    ],
)
def test_what_is_no_folder(name: str, said: str, remedy: str, tmp_path: Path, command: Run) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(30))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    for how in (["generate", "-p", "x"], ["inspect"]):
        done = command(how[0], tmp_path / name, *how[1:])
        assert (done.code, done.out) == (3, b"")
        assert said in done.err
        assert f"  hint: {remedy}" in done.err
    done = command("inspect", tmp_path / name, "--json")
    report = json.loads(done.out)
    assert (done.code, report["loads"]) == (3, False)
    assert said in report["problems"][0]["text"]
    assert remedy in report["problems"][0]["remedy"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (config(eos_token_id=10**6), "stop tokens that are none of the tokenizer's 273: 1000000"),
        (template("{% if %}"), "chat template is broken"),
        (template(""), "the model's chat template makes no text of the messages"),
        (dangling("generation_config.json"), "generation_config.json is a broken link"),
        (template("{{ raise_exception('pairs') }}"), "refuses: pairs (for a single message)"),
        (content("generation_config.json", b"{"), "ignored: "),
        (pipe("generation_config.json"), "generation_config.json is a pipe"),
        (as_folder("generation_config.json"), "generation_config.json is a folder"),
        (copied(SINGLE, "consolidated.safetensors"), ""),
        (
            lambda f: content("config.json", b"\xef\xbb\xbf" + (f / "config.json").read_bytes())(f),
            "",
        ),
    ],
)
def test_what_loads_all_the_same(broken: Break, said: str, tmp_path: Path, command: Run) -> None:
    """Noted, if it is worth a note: with --raw, or another prompt, such a model runs."""
    broken(tiny(tmp_path))
    found = command("inspect", tmp_path, "--json")
    report = json.loads(found.out)
    assert (found.code, report["loads"], report["problems"]) == (0, True, [])
    assert any(said in note for note in report["notes"]) or not said
    assert command("generate", tmp_path, "-p", "x", "-n", "1", "--raw", "-q").code == 0


def test_a_tokenizer_wider_than_the_model(tmp_path: Path, command: Run) -> None:
    """Fine until a prompt holds a token that the model has no row for."""
    narrow = {"vocab_size": 272}  # the tokenizer's last, an added token, is 272
    tiny(tmp_path, config=narrow)
    assert (
        "the tokenizer has 273 tokens, the model 272" in command("inspect", tmp_path).out.decode()
    )
    assert command("generate", tmp_path, "-p", "he", "-n", "1").code == 0
    done = command("generate", tmp_path, "-p", "<｜größe｜>", "-n", "1")
    assert (done.code, done.out) == (4, b"")
    assert "the prompt holds token 272, the model knows those up to 271" in done.err
