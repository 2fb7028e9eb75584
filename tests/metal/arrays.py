"""Arrays of numpy and of MLX, and the names that Metal has for their types.

bfloat16 does not exist in numpy: there it is a uint16 array inside `Bfloat16`, or an MLX array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

METAL_TYPES = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "float32": "float",
    "bfloat16": "bfloat16_t",
}


class Bfloat16:
    """A bfloat16 array as its bits: `Bfloat16(uint16_array)`; `.float32()` widens it."""

    def __init__(self, bits: np.ndarray) -> None:
        self.bits = np.asarray(bits, dtype=np.uint16)

    @staticmethod
    def of(values: np.ndarray) -> Bfloat16:
        """Round float32 values to nearest, ties to even."""
        u = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
        return Bfloat16(((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16))

    def float32(self) -> np.ndarray:
        return (self.bits.astype(np.uint32) << 16).view(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


def is_mlx(x: Any) -> bool:
    return type(x).__module__.split(".")[0] == "mlx"


def dtype_name(dtype: Any) -> str:
    """Any spelling of a dtype -> the name MLX and numpy share, "bfloat16" included."""
    if isinstance(dtype, str):
        return dtype
    if is_mlx(dtype):
        return str(dtype).split(".")[-1]
    return "bool" if np.dtype(dtype) == np.bool_ else np.dtype(dtype).name


def kind_of(x: Any) -> tuple[str, tuple[int, ...]]:
    """(dtype name, shape) of an array of any kind; nothing is evaluated."""
    if isinstance(x, Bfloat16):
        return "bfloat16", x.shape
    if not is_mlx(x):
        x = np.asarray(x)
    return dtype_name(x.dtype), tuple(x.shape)


def bits_of(x: Any) -> tuple[np.ndarray, str]:
    """An array of any kind -> (numpy array of the same bits, dtype name)."""
    if isinstance(x, Bfloat16):
        return x.bits, "bfloat16"
    if is_mlx(x):
        name = dtype_name(x.dtype)
        if name == "bfloat16":
            import mlx.core as mx

            return np.array(x.view(mx.uint16)), name
        return np.array(x), name
    array = np.asarray(x)
    if (name := dtype_name(array.dtype)) not in METAL_TYPES:
        raise TypeError(f"Metal has no {name}")
    return array, name


def empty_bits(shape: tuple[int, ...], name: str) -> np.ndarray:
    return np.empty(shape, np.uint16 if name == "bfloat16" else np.dtype(name))


def from_bits(bits: np.ndarray, name: str, as_mlx: bool) -> Any:
    if not as_mlx:
        return Bfloat16(bits) if name == "bfloat16" else bits
    import mlx.core as mx

    array = mx.array(bits)
    return array.view(mx.bfloat16) if name == "bfloat16" else array
