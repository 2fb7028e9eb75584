"""The GGUF container and its block types."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from qrun import gguf_blocks
from qrun.errors import CheckpointError, QrunError
from qrun.gguf import TYPES, open_gguf
from qrun.gguf_config import llama3_factors
from tests.gguf_writer import random_blocks, reference, tiny_gguf, write_gguf

TYPES_BY_NAME = {name: (block, size) for name, block, size in TYPES.values()}
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


@pytest.mark.parametrize("kind", TYPES_BY_NAME)
def test_dequantize_like_the_gguf_package(kind: str) -> None:
    """All types of the container, on random bits; the rarer ones are the package's own work."""
    quants = pytest.importorskip("gguf.quants")
    kinds = pytest.importorskip("gguf.constants").GGMLQuantizationType
    rng = np.random.default_rng(9)
    if kind in ("F32", "F16", "BF16") or kind in SHORT_TYPES:
        raw = random_blocks(kind, (4, 512), rng)
    else:
        block, size = TYPES_BY_NAME[kind]
        raw = rng.integers(0, 60, (4, 512 // block * size), dtype=np.uint8).tobytes()
    rows = np.frombuffer(raw, np.uint8).reshape(4, -1)
    gguf_blocks.require_reader(kind)
    found = gguf_blocks.dequantize(kind, rows)
    expected = quants.dequantize(rows, kinds[kind]).reshape(4, -1)
    assert found.shape == (4, 512)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-22 * np.abs(expected).max())


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    gguf_blocks.require_reader("Q6_K")
    with pytest.raises(QrunError, match="Q2_K need the package gguf") as error:
        gguf_blocks.require_reader("Q2_K")
    assert error.value.hint == "pip install 'qrun[convert]'"


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_pack(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 96), dtype=np.uint8)
    np.testing.assert_array_equal(unpack(gguf_blocks.pack(codes, bits), bits), codes)


# ---- the container


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", *tiny_gguf(np.random.default_rng(1)))


def test_reads_back(small: Path) -> None:
    metadata, tensors = tiny_gguf(np.random.default_rng(1))
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
