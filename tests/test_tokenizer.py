"""Encoding, decoding, streaming: the stream of any ids, joined, is the decode of all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qrun.errors import CheckpointError, PromptTooLongError, UsageError
from qrun.tokenizer import StopFinder, StreamingDecoder, Tokenizer
from tests.tiny import ADDED, TOKENIZERS, VOCAB, write_template

KINDS = ("bytelevel", "sentencepiece")


def write(folder: Path, kind: str) -> Path:
    TOKENIZERS[kind]().save(str(folder / "tokenizer.json"))
    bos = {"bos_token": "<s>"} if kind == "sentencepiece" else {}
    write_template(folder, {"eos_token": "<|im_end|>", **bos}, None)
    return folder


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(write(Path(mkdtemp()), kind))


def stream(kind: str, ids: Sequence[int]) -> list[str]:
    decoder = StreamingDecoder(tokenizer(kind))
    return [*(decoder.add(i) for i in ids), decoder.finish()]


def ids_of(kind: str, *texts: str) -> list[int]:
    inner = tokenizer(kind).inner
    return [inner.token_to_id(text) for text in texts]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=400)
@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=24))
def test_case_08_any_ids_stream_as_they_decode(kind: str, ids: list[int]) -> None:
    ids = [i for i in ids if i < tokenizer(kind).size_within(VOCAB)]
    assert "".join(stream(kind, ids)) == tokenizer(kind).decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=12))
@example(text="  two leading spaces")
@example(text="a\x00b")
@example(text="👩‍👩‍👧 ok")
@example(text=f"x {ADDED} y{ADDED}")
@example(text="\ufffd")
@example(text="naïve 日本語 é")
def test_case_08_any_text_streams_as_it_decodes(kind: str, text: str) -> None:
    ids = tokenizer(kind).inner.encode(text, add_special_tokens=False).ids
    pieces = stream(kind, ids)
    assert "".join(pieces) == tokenizer(kind).decode(ids)
    if kind == "bytelevel":
        assert "".join(pieces) == text


@pytest.mark.parametrize("kind", KINDS)
def test_case_08_an_emoji_is_never_split(kind: str) -> None:
    ids = tokenizer(kind).inner.encode("a🙂b", add_special_tokens=False).ids
    assert len(ids) > 3
    pieces = [p for p in stream(kind, ids) if p]
    assert not any("\ufffd" in p for p in pieces)
    assert any("🙂" in p for p in pieces)


def test_case_08_lone_continuation_bytes_sentencepiece() -> None:
    for names in (
        ["<0x80>"],
        ["a", "<0x80>", "b"],
        ["<0xF0>", "<0x9F>", "a"],
        ["<0x00>", "a"],
        ["<0x00>", "<s>", "<0x80>"],
    ):
        ids = ids_of("sentencepiece", *names)
        assert "".join(stream("sentencepiece", ids)) == tokenizer("sentencepiece").decode(ids)


def test_case_08_leading_space_of_a_later_piece_stays() -> None:
    ids = ids_of("sentencepiece", "▁the", "▁the", "▁a")
    assert stream("sentencepiece", ids) == ["the", " the", " a", ""]


def test_case_08_no_byte_alphabet_in_the_text() -> None:
    ids = tokenizer("bytelevel").inner.encode(" the\nhello").ids
    assert "".join(stream("bytelevel", ids)) == " the\nhello"


@pytest.mark.parametrize("kind", KINDS)
def test_streaming_delivers_at_once_what_is_certain(kind: str) -> None:
    ids = tokenizer(kind).inner.encode("hello inn", add_special_tokens=False).ids
    decoder = StreamingDecoder(tokenizer(kind))
    for n, token in enumerate(ids, 1):
        decoder.add(token)
        assert "".join(stream(kind, ids)[:n]) == tokenizer(kind).decode(ids[:n])


@pytest.mark.parametrize("kind", KINDS)
def test_case_18_streaming_a_long_text_stays_cheap(kind: str) -> None:
    """Work a token must not grow with the text: no step decodes more than a few ids."""
    decoder = StreamingDecoder(tokenizer(kind))
    longest = 0
    decode = decoder._tokenizer.decode

    class Counting:
        settles = staticmethod(tokenizer(kind).settles)

        @staticmethod
        def decode(ids: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return decode(ids)

    decoder._tokenizer = Counting()  # pyright: ignore[reportAttributeAccessIssue]
    for token in ids_of(kind, "a", "n", "e") * 100:
        decoder.add(token)
    assert longest <= 4


def test_special_tokens_are_not_in_the_text() -> None:
    ids = ids_of("bytelevel", "h", "<|im_end|>", "e")
    assert "".join(stream("bytelevel", ids)) == "he"


def test_encode_adds_bos_exactly_once() -> None:
    t = tokenizer("sentencepiece")
    assert t.encode("the")[0] == t.bos
    assert t.encode("<s>the").count(t.bos) == 1


def test_size_bounds_what_may_be_sampled() -> None:
    for kind in KINDS:
        t = tokenizer(kind)
        assert t.inner.id_to_token(t.size_within(1000) - 1) is not None
        assert t.inner.id_to_token(t.size_within(1000)) is None


def test_special_token_as_object(tmp_path: Path) -> None:
    write(tmp_path, "bytelevel")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": None})
    )
    t = Tokenizer(tmp_path)
    assert t.eos == t.inner.token_to_id("<|im_end|>")
    assert t.bos is None


def test_tokenizer_json_alone_is_enough(tmp_path: Path) -> None:
    TOKENIZERS["bytelevel"]().save(str(tmp_path / "tokenizer.json"))
    t = Tokenizer(tmp_path)
    assert t.decode(t.encode("hello")) == "hello"
    assert (t.eos, t.bos, t.template) == (None, None, None)


def test_case_10_a_file_that_truncates_and_pads_does_not(tmp_path: Path) -> None:
    """As transformers writes it after a training with padded batches."""
    inner = TOKENIZERS["bytelevel"]()
    inner.enable_truncation(max_length=4)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    t = Tokenizer(tmp_path)
    assert t.decode(t.encode("hello world")) == "hello world"
    assert len(t.encode("h")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_case_10_what_cannot_fit_is_refused_untokenized(kind: str, tmp_path: Path) -> None:
    t = Tokenizer(write(tmp_path, kind), context=100)

    class Untouched:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

    with pytest.raises(PromptTooLongError, match=r"has \d{4,} tokens or more, .* holds 100, and"):
        t.encode("some words " * 20_000)
    assert t.encode(" " * 1600)  # one token may hold any number of blanks
    t.inner = Untouched()  # from here on nothing asks the library
    for text in ("some words " * 20_000, "ß" * 90_000):
        with pytest.raises(PromptTooLongError):
            t.encode(text)
        with pytest.raises(PromptTooLongError):
            t.encode_chat([{"role": "user", "content": text}])


def test_a_text_that_may_vanish_is_tokenized(tmp_path: Path) -> None:
    """Characters that are one unknown token together, or that are removed, fit anywhere."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, pre_tokenizers

    fused = Inner(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    removed = TOKENIZERS["bytelevel"]()
    removed.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for inner in (fused, removed):
        inner.save(str(tmp_path / "tokenizer.json"))
        assert len(Tokenizer(tmp_path, context=10).encode("x" * 5000)) < 2


@pytest.mark.parametrize("other", ["tokenizer.model", "tekken.json"])
def test_only_another_tokenizer_file_is_said(other: str, tmp_path: Path) -> None:
    (tmp_path / other).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"only {other}; qrun needs tokenizer.json"):
        Tokenizer(tmp_path)


def test_no_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


# ---- stop strings

TEXT = st.text("ab\nc", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def cut(text: str, stops: list[str]) -> str:
    """By definition: read letter by letter until a stop string (the longest) ends; drop it."""
    for end in range(len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@settings(deadline=None, max_examples=300)
@given(TEXT, STOPS, st.integers(1, 30))
def test_case_16_stop_strings_across_pieces(text: str, stops: list[str], size: int) -> None:
    finder = StopFinder(stops)
    printed = ""
    for start in range(0, len(text), size):
        printed += finder.add(text[start : start + size])
        assert cut(text, stops).startswith(printed)
        if finder.found:
            break
    printed += finder.add("", last=True)
    assert printed == cut(text, stops)
    assert finder.found == any(s in text for s in stops)


def test_case_16_nothing_of_a_stop_string_is_printed_early() -> None:
    finder = StopFinder(["<end>"])
    assert [finder.add(piece) for piece in ("abc<", "en", "x <", "end", "> more")] == [
        "abc",
        "",
        "<enx ",
        "",
        "",
    ]
    assert finder.found


def test_an_empty_stop_string_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="must not be empty"):
        StopFinder(["a", ""])
