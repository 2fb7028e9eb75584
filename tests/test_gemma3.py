"""A real GGUF of a second family: gemma 3 270M, in Q4_K_M. tests/README.md says where it is had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from qrun.convert import convert
from qrun.generation import generate
from qrun.loader import load
from tests.test_gguf_tokenizer import assert_same


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = os.environ.get("QRUN_GEMMA3_GGUF")
    if not path:
        pytest.skip("QRUN_GEMMA3_GGUF is not set")
    made = tmp_path_factory.mktemp("gemma3") / "model"
    report = convert(Path(path), made)
    # embed_tokens, and the matrices of 18 layers that are no Q6_K
    assert (report.model_type, report.kept + report.quantized) == ("gemma3_text", 1 + 18 * 7)
    yield made
    for file in made.iterdir():  # 260 MB that pytest would keep for three more runs
        file.unlink()


def test_it_talks_sense(folder: Path) -> None:
    """It is a base model without a chat template: it goes on."""
    model = load(folder)
    text = generate(model, "What is the capital of France?", max_tokens=12).text
    assert text.strip().startswith("The capital of France is Paris.")
    text = generate(model, "One, two, three, four, five,", max_tokens=10).text
    assert text.startswith(" six, seven, eight,")


def test_its_tokenizer_is_the_published_one(folder: Path) -> None:
    """From the file's own pieces and scores: the same ids as the original tokenizer.json."""
    published = os.environ.get("QRUN_TOKENIZERS")
    if not published:
        pytest.skip("QRUN_TOKENIZERS is not set")
    original = Path(published) / "gemma3/package/models/tokenizer.json"
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert_same(tokenizers.Tokenizer.from_file(str(original)), ours)
