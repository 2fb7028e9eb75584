"""RoPE settings of a GGUF as config.json writes them; an unknown type is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from qrun.errors import CheckpointError
from qrun.gguf import GGUF
from qrun.gguf_blocks import dequantize

Number = Callable[[str, float], float]
Count = Callable[[str, int], int]


def rope_config(
    gguf: GGUF, prefix: str, head_dim: int, number: Number, count: Count
) -> dict[str, Any]:
    """rope_theta and, where positions are scaled, rope_scaling."""
    config: dict[str, Any] = {"rope_theta": number("rope.freq_base", 10000.0)}
    rotated = count("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CheckpointError(
            f"{gguf.path}: rope turns {rotated} of {head_dim} dimensions, "
            f"which {prefix} models cannot express"
        )
    scaling = _scaling(gguf, prefix, number, count)
    if "rope_freqs.weight" in gguf.tensors:
        factors = dequantize("F32", gguf.rows("rope_freqs.weight"))[:, 0]
        if gguf.tensors["rope_freqs.weight"].type != "F32" or factors.size != head_dim // 2:
            raise CheckpointError(f"{gguf.path}: rope_freqs.weight does not fit the heads")
        if not np.all(factors == 1):
            if scaling:
                raise CheckpointError(f"{gguf.path}: rope_freqs.weight beside rope.scaling")
            scaling = _llama3(gguf, factors, config["rope_theta"], count)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _scaling(gguf: GGUF, prefix: str, number: Number, count: Count) -> dict[str, Any] | None:
    kind = gguf.metadata.get(f"{prefix}.rope.scaling.type")
    linear = number("rope.scale_linear", 0.0)  # the name before rope.scaling existed
    if kind is None and linear not in (0.0, 1.0):
        return {"rope_type": "linear", "factor": linear}
    if kind in (None, "none"):
        return None
    factor = number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = count("rope.scaling.original_context_length", 0)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise CheckpointError(f"{gguf.path}: unknown rope scaling type {kind!r}")


def _llama3(
    gguf: GGUF, factors: npt.NDArray[np.float32], theta: float, count: Count
) -> dict[str, Any]:
    """The parameters behind a table of frequency factors, if they are Llama 3's."""
    original = count("rope.scaling.original_context_length", 8192)
    factor = float(factors.max())
    if np.allclose(factors, llama3_factors(factors.size, theta, factor, original), rtol=1e-4):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
    raise CheckpointError(f"{gguf.path}: rope_freqs.weight is not Llama 3's scaling")


def llama3_factors(
    pairs: int, theta: float, factor: float, original: int
) -> npt.NDArray[np.float64]:
    """What Llama 3 divides each of the frequencies theta**(-i/pairs) by (pairs,).

    Wavelengths under original/4 stay, those over original/1 are divided by `factor`, and in
    between the inverse runs linearly in original/wavelength.
    """
    wavelength = 2 * math.pi * theta ** (np.arange(pairs) / pairs)
    smooth = np.clip((original / wavelength - 1) / 3, 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
