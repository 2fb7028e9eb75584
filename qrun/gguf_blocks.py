"""GGUF's block types: the ones that are affine integers already, and dequantization of the rest.

Seven types are `scale * q + bias` with one scale and one bias for each 32 elements, which is what
MLX calls affine with group size 32, so their integers are kept. Written out, for a block with the
float16 numbers d and m (and, in K-quants, the small integers s and t of each 32 elements):

    type   bits  scale    bias     type   bits  scale  bias
    Q4_0    4    d        -8 d     Q8_0    8    d      -128 d
    Q4_1    4    d        m        Q4_K    4    d s    -m t
    Q5_0    5    d        -16 d    Q5_K    5    d s    -m t
    Q5_1    5    d        m

All of them are exact in float32. In the left column float16 is exact too: a power of two times d is
a float16 unless it overflows, which is checked where the scales are cast.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from qrun.errors import QrunError

# uint8 and float32; numpy's own annotations forget that shifts and products keep these
Bytes = npt.NDArray[Any]
Floats = npt.NDArray[Any]

GROUP = 32
AFFINE_BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}
# scales and biases of these are float16 numbers; those of the K-quants are products of two
EXACT_IN_FLOAT16 = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})


def affine(kind: str, raw: Bytes) -> tuple[Bytes, Floats, Floats]:
    """Integers (N, K), scales (N, K/32) and biases (N, K/32) of raw rows (N, bytes of a row)."""
    n = raw.shape[0]
    if kind in ("Q4_K", "Q5_K"):
        codes, scales, biases = _affine_k(kind, raw.reshape(-1, 144 if kind == "Q4_K" else 176))
    elif kind == "Q8_0":
        blocks = raw.reshape(-1, 34)
        scales = _half(blocks[:, :2])
        codes, biases = blocks[:, 2:] ^ np.uint8(0x80), scales * -128  # int8 + 128, as a byte
    else:
        size = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24}[kind]
        blocks = raw.reshape(-1, size)
        codes = _nibbles(blocks[:, -16:])
        scales = _half(blocks[:, :2])
        if kind in ("Q5_0", "Q5_1"):  # bit i of the word in front is the fifth bit of element i
            fifth = np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little")
            codes = codes | fifth << 4
        if kind in ("Q4_1", "Q5_1"):
            biases = _half(blocks[:, 2:4])
        else:
            biases = scales * (-8 if kind == "Q4_0" else -16)
    return codes.reshape(n, -1), scales.reshape(n, -1), biases.reshape(n, -1)


def _affine_k(kind: str, blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """Q4_K and Q5_K blocks (B, bytes): 256 elements, 8 groups with 6-bit scales and minima."""
    d, dmin = _half(blocks[:, :2]), _half(blocks[:, 2:4])
    s, t = _six_bit_pairs(blocks[:, 4:16])
    codes = _nibbles(blocks[:, -128:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    if kind == "Q5_K":  # bit g of byte i is the fifth bit of element i of group g
        fifth = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")
        codes = codes | fifth.transpose(0, 2, 1) << 4
    return codes, d * s.astype(np.float32), dmin * -t.astype(np.float32)


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Twelve bytes (B, 12) hold eight scales and eight minima of six bits each (B, 8).

    Groups 0..3 lie in the low six bits of bytes 0..3 (scale) and 4..7 (minimum); of groups 4..7
    the low four bits are the nibbles of bytes 8..11, the high two bits the tops of bytes 0..7.
    """
    low, middle, tail = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (tail & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (tail >> 4) | (middle >> 6 << 4)], axis=1)
    return scales, minima


def dequantize(kind: str, raw: Bytes) -> Floats:
    """Float32 values (N, K) of raw rows (N, bytes of a row) of any type."""
    n = raw.shape[0]
    if kind == "F32":
        return np.ascontiguousarray(raw).view("<f4")
    if kind == "F16":
        return np.ascontiguousarray(raw).view("<f2").astype(np.float32)
    if kind == "BF16":
        wide = np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16
        return wide.view(np.float32)
    if kind in AFFINE_BITS:
        codes, scales, biases = affine(kind, raw)
        grouped = codes.reshape(n, -1, GROUP).astype(np.float32)
        return (grouped * scales[..., None] + biases[..., None]).reshape(n, -1)
    if kind == "Q6_K":
        return _dequantize_q6_k(raw.reshape(-1, 210)).reshape(n, -1)
    quants, types = _gguf_package(kind)
    return quants.dequantize(np.ascontiguousarray(raw), types[kind]).reshape(n, -1)


def require_reader(kind: str) -> None:
    """Raise now, and not halfway, if a type cannot be dequantized here."""
    if kind not in ("F32", "F16", "BF16", "Q6_K", *AFFINE_BITS):
        _gguf_package(kind)


def _dequantize_q6_k(blocks: Bytes) -> Floats:
    """Blocks (B, 210) of 256 elements: 4 low bits, 2 high bits, a signed scale for each 16, d."""
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (q * scales[..., None]).reshape(-1, 256)


def _gguf_package(kind: str) -> tuple[Any, Any]:
    """PyPI's gguf, which knows the rarer types, and its names of them; loaded only if needed."""
    try:
        quants = importlib.import_module("gguf.quants")
        return quants, importlib.import_module("gguf.constants").GGMLQuantizationType
    except ImportError:
        raise QrunError(
            f"tensors of GGUF type {kind} need the package gguf",
            hint="pip install 'qrun[convert]'",
        ) from None


def _half(raw: Bytes) -> Floats:
    """Float16 numbers (B, 2 n bytes) as float32 (B, n)."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """All low nibbles of the last axis, then all high ones: GGUF's order within a block."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def pack(codes: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """`quantization.pack`, quickly: integers (N, K) to (N, K*bits/32)."""
    if bits == 8:
        stream = codes
    elif bits == 4:
        stream = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        # Eight at a time: the bytes of a 64-bit word move together in three steps, each closing
        # the gap between the halves of every lane; its lowest `bits` bytes are then full.
        x = np.ascontiguousarray(codes).view("<u8")
        for lane in (8, 16, 32):
            low = np.uint64(sum(((1 << lane) - 1) << at for at in range(0, 64, 2 * lane)))
            x = (x & low) | (x & ~low) >> np.uint64(lane - lane * bits // 8)
        stream = x.view(np.uint8).reshape(-1, 8)[:, :bits].reshape(len(codes), -1)
    return np.ascontiguousarray(stream).view("<u4")
