"""The GGUF container and its block types."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from qrun import gguf_blocks
from qrun.errors import CheckpointError
from qrun.gguf import open_gguf
from qrun.gguf_config import llama3_factors
from qrun.gguf_pretokenizers import PRE_TOKENIZERS
from qrun.gguf_tokenizer import tokenizer_files
from tests.gguf_writer import random_blocks, reference, tiny_llama, tiny_tokenizer, write_gguf

SHORT_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def raw_rows(kind: str, n: int, k: int, seed: int = 0) -> tuple[bytes, np.ndarray]:
    raw = random_blocks(kind, (n, k), np.random.default_rng(seed))
    return raw, np.frombuffer(raw, np.uint8).reshape(n, -1)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Integers (N, K) of MLX's bit stream (N, K*bits/32), one big integer a row."""
    rows = [int.from_bytes(row.tobytes(), "little") for row in packed]
    count = packed.shape[1] * 32 // bits
    return np.array([[r >> i * bits & (1 << bits) - 1 for i in range(count)] for r in rows])


@pytest.mark.parametrize("kind", gguf_blocks.AFFINE_BITS)
def test_affine_blocks_are_exact(kind: str) -> None:
    """float64 scale*q + bias equals the block's own arithmetic, with no rounding of the scales."""
    raw, rows = raw_rows(kind, 3, 512)
    codes, scales, biases = gguf_blocks.affine(kind, rows)
    if kind in gguf_blocks.EXACT_IN_FLOAT16:
        assert (scales.astype(np.float16) == scales).all()
        assert (biases.astype(np.float16) == biases).all()
    bits = gguf_blocks.AFFINE_BITS[kind]
    q = unpack(gguf_blocks.pack(codes, bits), bits).reshape(3, -1, 32).astype(np.float64)
    values = q * scales[..., None].astype(np.float64) + biases[..., None].astype(np.float64)
    np.testing.assert_array_equal(values.reshape(-1), reference(kind, raw))


@pytest.mark.parametrize("kind", [*SHORT_TYPES, "F32", "F16", "BF16"])
def test_dequantize(kind: str) -> None:
    raw, rows = raw_rows(kind, 2, 512)
    exact = reference(kind, raw).reshape(2, 512)
    bound = 2.0**-22 * np.abs(exact).max()
    np.testing.assert_allclose(gguf_blocks.dequantize(kind, rows), exact, rtol=0, atol=bound)


def test_extreme_scales() -> None:
    """Subnormal and zero scales stay exact: times a power of two never rounds upwards."""
    d = np.array([2**-24, -(2**-24), 0.0, 500.0], "<f2")
    blocks = np.zeros((4, 34), np.uint8)
    blocks[:, :2] = d.view(np.uint8).reshape(4, 2)
    _, scales, biases = gguf_blocks.affine("Q8_0", blocks)
    assert (biases[:, 0].astype(np.float16) == d.astype(np.float64) * -128).all()
    assert (scales[:, 0] == d).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_pack(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 96), dtype=np.uint8)
    np.testing.assert_array_equal(unpack(gguf_blocks.pack(codes, bits), bits), codes)


# ---- the container


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", *tiny_llama(np.random.default_rng(1)))


def test_reads_back(small: Path) -> None:
    metadata, tensors = tiny_llama(np.random.default_rng(1))
    found = open_gguf(small)
    assert found.metadata.keys() == metadata.keys()
    assert found.metadata["tokenizer.ggml.tokens"] == metadata["tokenizer.ggml.tokens"]
    assert found.metadata["tokenizer.ggml.add_bos_token"] is False
    assert found.metadata["tokenizer.ggml.token_type"].tolist()[:4] == [3, 3, 3, 1]
    for name, (kind, shape, raw) in tensors.items():
        assert (found.tensors[name].type, found.tensors[name].shape) == (kind, shape)
        assert found.rows(name).tobytes() == raw


def refused(path: Path) -> str:
    """The one line of the refusal, which names the file and costs little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as error:
            open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "only 0 bytes"),
        (b"GGUF\x03\x00\x00\x00", "only 8 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "begins with b'vers'"),
        (b"<!DOCTYPE html><html>no such file</html>", "not a GGUF file"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack("<4sIQQ", b"GGUF", 99, 0, 0), "version 99"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 0), "tensors cannot fit"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63), "metadata entries cannot fit"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**62) + bytes(20), "ends past the end"),
        (
            struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 10, 2**61),
            "ends past the end",
        ),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 8, 2**60), "cannot fit"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 77, 8, 2), "unknown type 77"),
        (struct.pack("<4sIQQQ1sIQ", b"GGUF", 3, 0, 1, 1, b"\xff", 8, 0), "UTF-8"),
    ],
)
def test_refuses_bad_headers(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert reason in refused(path)


def one_tensor(tmp_path: Path, dims: tuple[int, ...], kind: int, offset: int) -> Path:
    head = struct.pack("<4sIQQQ1sI", b"GGUF", 3, 1, 0, 1, b"t", len(dims))
    head += struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)
    path = tmp_path / "one.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(64))
    return path


@pytest.mark.parametrize(
    ("dims", "kind", "offset", "reason"),
    [
        ((16,), 0, 32, "truncated: tensor t ends at byte"),
        ((16,), 0, 2**64 - 32, "truncated"),
        ((2**63, 2**63, 2**63), 0, 0, "truncated"),
        ((16,), 0, 8, "not aligned"),
        ((0,), 0, 0, "bad shape"),
        ((48,), 2, 0, "bad shape"),
        ((16,), 5, 0, "unknown tensor type 5"),
        ((16,), 12345, 0, "unknown tensor type 12345"),
        ((1, 1, 1, 1, 1), 0, 0, "5 dimensions"),
        ((), 0, 0, "0 dimensions"),
    ],
)
def test_refuses_bad_tensors(
    tmp_path: Path, dims: tuple[int, ...], kind: int, offset: int, reason: str
) -> None:
    assert reason in refused(one_tensor(tmp_path, dims, kind, offset))


def test_refuses_every_truncation(small: Path) -> None:
    content = small.read_bytes()
    for length in [*range(0, 400), *range(400, len(content), 997), len(content) - 1]:
        small.write_bytes(content[:length])
        refused(small)


def test_mutations_never_escape(small: Path) -> None:
    """A changed byte in the header gives a readable file or a CheckpointError, nothing else."""
    content = small.read_bytes()
    rng = np.random.default_rng(7)
    lines: list[str] = []
    for _ in range(1000):
        at, value = int(rng.integers(0, 9000)), int(rng.integers(0, 256))
        small.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
        try:
            open_gguf(small)
        except CheckpointError as error:
            lines.append(str(error))
    assert lines
    assert not any("\n" in line for line in lines)


# ---- the tokenizer


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


def test_llama3_factors() -> None:
    """Against the published rule, frequency by frequency, with Llama 3.1's numbers."""
    for i, factor in enumerate(llama3_factors(64, 500000.0, 8.0, 8192)):
        wavelength = 2 * np.pi * 500000.0 ** (2 * i / 128)
        if wavelength < 8192 / 4:
            expected = 1.0
        elif wavelength > 8192:
            expected = 8.0
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = 1 / ((1 - smooth) / 8 + smooth)
        assert factor == pytest.approx(expected, rel=1e-12)
