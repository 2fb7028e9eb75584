"""What a quantized matrix is: its spec, how codes lie in words, how shapes tell the spec.

Layout (MLX's): `w` is uint32 (N, K*bits/32). Each row is one little-endian bit stream, so code k
occupies bits k*bits .. k*bits+bits-1 of its row; 3-, 5- and 6-bit codes straddle words.
`scales` and `biases` are (N, K/group_size).

* affine:          value = scale * q + bias
* mxfp4, nvfp4:    q is an e2m1 float; the group's uint8 scale is e8m0 (mxfp4) or e4m3 (nvfp4)
* mxfp8:           q is an e4m3 float; scale e8m0
  (OCP Microscaling Formats specification v1.0 for the mx formats.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qrun.lazy import np, npt

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
# mode -> (group_size, bits); affine's entry is its default, the others admit nothing else.
MODES = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


@dataclass(frozen=True)
class Quantization:
    """How one matrix is stored. Raises ValueError where no such format exists."""

    bits: int = 4
    group_size: int = 64
    mode: str = "affine"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown quantization mode {self.mode!r} (known: {', '.join(MODES)})")
        group, bits = MODES[self.mode]
        if self.mode == "affine":
            if self.bits not in AFFINE_BITS:
                raise ValueError(f"{self.bits} bits are not supported (affine: {AFFINE_BITS})")
            if self.group_size not in AFFINE_GROUPS:
                raise ValueError(
                    f"group size {self.group_size} is not supported (affine: {AFFINE_GROUPS})"
                )
        elif (self.group_size, self.bits) != (group, bits):
            raise ValueError(
                f"{self.mode} is {bits} bits in groups of {group}, "
                f"not {self.bits} bits in groups of {self.group_size}"
            )

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit, group {self.group_size}"


def infer(
    k: int, w_shape: tuple[int, ...], scales_shape: tuple[int, ...], *, float_scales: bool
) -> Quantization:
    """Read the spec off the shapes of w (N, W) and scales (N, G) of a matrix with K = k inputs.

    Raises ValueError saying which axis does not fit.
    """
    if len(w_shape) != 2 or len(scales_shape) != 2:
        raise ValueError(f"w {w_shape} and scales {scales_shape} must both have two axes")
    if w_shape[0] != scales_shape[0]:
        raise ValueError(f"w has {w_shape[0]} rows, scales have {scales_shape[0]}")
    bits, rest = divmod(w_shape[1] * 32, k)
    if rest or not bits:
        raise ValueError(
            f"{w_shape[1]} words a row do not hold {k} codes of a whole number of bits"
        )
    if not scales_shape[1] or k % scales_shape[1]:
        raise ValueError(f"{scales_shape[1]} scales a row do not divide {k} inputs")
    group = k // scales_shape[1]
    if float_scales:
        return Quantization(bits, group, "affine")
    for mode in ("nvfp4", "mxfp4", "mxfp8"):
        if (group, bits) == MODES[mode]:
            return Quantization(bits, group, mode)
    raise ValueError(f"no mode has 8-bit scales, {bits} bits and groups of {group}")


def unpack(w: npt.NDArray[np.uint32], bits: int, k: int) -> npt.NDArray[np.uint8]:
    """Codes (N, K) of packed w (N, K*bits/32)."""
    n = w.shape[0]
    if bits in (2, 4, 8):
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        mask = np.uint32((1 << bits) - 1)
        return ((w[:, :, None] >> shifts) & mask).astype(np.uint8).reshape(n, -1)[:, :k]
    stream = np.unpackbits(
        np.ascontiguousarray(w).view(np.uint8).reshape(n, -1), axis=1, bitorder="little"
    )
    each = stream[:, : k * bits].reshape(n, k, bits).astype(np.uint16)
    return (each << np.arange(bits, dtype=np.uint16)).sum(axis=2).astype(np.uint8)


def pack(q: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint32]:
    """Packed w (N, K*bits/32) of codes q (N, K); K*bits must be a multiple of 32."""
    n, k = q.shape
    if k * bits % 32:
        raise ValueError(f"{k} codes of {bits} bits do not fill whole 32-bit words")
    stream = (q.astype(np.uint8)[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    flat = np.packbits(stream.reshape(n, k * bits), axis=1, bitorder="little")
    return flat.view("<u4").astype(np.uint32)


def e4m3(code: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Values of OCP float8 e4m3 codes: sign, 4 exponent (bias 7), 3 mantissa bits; no infinity."""
    exponent = (code >> 3 & 15).astype(np.int32)
    mantissa = (code & 7).astype(np.float64)
    magnitude = np.where(
        exponent == 0,
        np.ldexp(mantissa, -9),
        np.ldexp(8 + mantissa, exponent - 10),
    )
    magnitude = np.where((code & 127) == 127, np.nan, magnitude)
    return np.where(code & 128, -magnitude, magnitude)


def dequantize_ref(
    w: npt.NDArray[np.uint32],
    scales: npt.NDArray[Any],
    biases: npt.NDArray[Any] | None,
    spec: Quantization,
) -> npt.NDArray[np.float64]:
    """The matrix (N, K) in float64. Every kernel's reference: it unpacks the bits itself."""
    k = w.shape[1] * 32 // spec.bits
    q = unpack(w, spec.bits, k)
    if spec.mode == "affine":
        if biases is None:
            raise ValueError("an affine matrix needs biases")
        values = q.astype(np.float64)
        s, b = scales.astype(np.float64), biases.astype(np.float64)
        return values * np.repeat(s, spec.group_size, 1) + np.repeat(b, spec.group_size, 1)
    values = e4m3(q) if spec.mode == "mxfp8" else np.array(E2M1)[q]
    s = e4m3(scales) if spec.mode == "nvfp4" else np.ldexp(1.0, scales.astype(np.int32) - 127)
    return values * np.repeat(s, spec.group_size, 1)
