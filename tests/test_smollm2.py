"""The real model: SmolLM2-135M-Instruct, converted from its GGUF, against mlx-lm and float64."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import qrun
from qrun.generation import decode_step, prefill
from qrun.loader import LoadedModel, load
from tests.conftest import Run
from tests.reference_model import ReferenceModel

# Made by scripts/record_smollm2.py: 8 prompts, 64 greedy tokens each, all in float32.
FIXTURE = Path(__file__).parent / "fixtures" / "smollm2_greedy.json"
RECORDS: list[dict[str, Any]] = json.loads(FIXTURE.read_text(encoding="utf-8"))["records"]
NAMES = [record["prompt"][:20].strip() for record in RECORDS]


@pytest.mark.native
@pytest.mark.parametrize("record", RECORDS, ids=NAMES)
def test_greedy_tokens_are_mlx_lms(record: dict[str, Any], smollm2_model: LoadedModel) -> None:
    endless = replace(smollm2_model, eos=frozenset[int]())
    result = qrun.generate(endless, record["prompt"], raw=record["raw"], max_tokens=64)
    assert len(record["tokens"]) == 64
    assert result.tokens == record["tokens"]
    assert result.text == record["text"]


@pytest.mark.parametrize("record", RECORDS, ids=NAMES)
def test_prompts_become_the_same_ids(record: dict[str, Any], smollm2_model: LoadedModel) -> None:
    tokenizer = smollm2_model.tokenizer
    if record["raw"]:
        assert tokenizer.encode(record["prompt"]) == record["ids"]
    else:
        messages = [{"role": "user", "content": record["prompt"]}]
        assert tokenizer.encode_chat(messages) == record["ids"]


LENGTH = 256


def a_text(length: int) -> list[int]:
    """Ids of prompts and their answers, one after the other."""
    ids = [token for r in RECORDS for token in r["ids"] + r["tokens"]]
    return ids[:length]


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> np.ndarray[Any, Any]:
    """Float64 logits behind every token of the text; behind a prefix of it they are the same."""
    return ReferenceModel(smollm2).logits(a_text(LENGTH))


def test_logits_agree_with_float64(
    backend: Any, smollm2: Path, exact: np.ndarray[Any, Any]
) -> None:
    """256 tokens, a sixteenth of them one by one; the slow fallback gets a shorter text."""
    length = LENGTH if backend.NAME != "mlx" else 16
    ids = a_text(length)
    model = load(smollm2, dtype="float32")
    cache = model.new_cache(length)
    head = length - length // 16
    hidden = model.model(mx.array(ids[:head], mx.int32), cache)
    cache.advance(head)
    rows = [model.model.logits(hidden)]
    step = decode_step(model, cache)
    for token in ids[head:]:
        rows.append(step(mx.array([token], mx.int32)))
        mx.eval(rows[-1])
    got, want = np.array(mx.concatenate(rows)).astype(np.float64), exact[:length]
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.native
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_case_03_sixteen_bit_activations_stay_near(
    dtype: str, smollm2: Path, exact: np.ndarray[Any, Any]
) -> None:
    """Rounding activations costs some percent; summing in 16 bits would cost far more."""
    model = load(smollm2, dtype=dtype)
    logits = prefill(model, a_text(64), model.new_cache(64))
    got, want = np.array(logits.astype(mx.float32))[0], exact[63]
    share = np.abs(got - want).max() / np.abs(want).max()
    assert share <= (0.004 if dtype == "float16" else 0.03)


@pytest.mark.native
def test_case_07_the_answer_ends_at_the_end_token(smollm2_model: LoadedModel) -> None:
    result = qrun.generate(smollm2_model, "What is the capital of France?", max_tokens=128)
    assert result.finish_reason == "stop"
    assert "Paris" in result.text
    assert "<|im_end|>" not in result.text


def test_the_command_line_answers(cli: Run, smollm2: Path) -> None:
    record = next(r for r in RECORDS if not r["raw"])
    done = cli("generate", smollm2, "-p", record["prompt"], "-n", 4, "--json", "-q")
    assert done.code == 0
    assert json.loads(done.out)["tokens"] == record["tokens"][:4]


def test_the_folder_names_what_it_is(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization"]["bits"] == 4
    assert config["quantization"]["group_size"] == 32


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count resident pages otherwise")
@pytest.mark.parametrize("words", [5, 470])
def test_memory_is_weights_cache_and_60_mb(
    cli: Run, smollm2: Path, smollm2_model: LoadedModel, words: int
) -> None:
    """The peak of a whole process. 35 tokens leave 9 MB of 60 to spare, 500 leave 2 here."""
    prompt = " ".join(["word"] * words)
    done = cli("generate", smollm2, "-p", prompt, "-n", 12, "--stats", "--no-tune")
    assert done.code == 0, done.err
    told = dict(line.split(None, 1) for line in done.err.splitlines())
    held = smollm2_model.new_cache(words + 42).nbytes
    assert int(told["peak"].split()[0]) * 1e6 < smollm2_model.step_bytes + held + 60e6
