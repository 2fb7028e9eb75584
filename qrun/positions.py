"""Rotary frequencies of every scaling rule, and the cos/sin table that the rope op reads.

A rule is data: frequencies in float64, perhaps depending on the length, and one factor on the
cosines and sines. Sources: linear (Chen et al., 2023), dynamic NTK, YaRN (Peng et al., 2023),
LongRoPE (Ding et al., 2024), llama3 (the Llama 3.1 release).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import mlx.core as mx

from qrun.config import AGAIN, TINY, UPDATE, Config
from qrun.errors import CheckpointError

Frequencies: TypeAlias = Sequence[float]
BLOCK = 64  # positions whose angles are worked out together


@dataclass(frozen=True)
class Rope:
    """Angles of one kind of layer: position * inv_freq(length), cos and sin times `factor`.

    `length` is the number of positions a text may reach, prompt and generation together. Where the
    frequencies depend on it (dynamic, longrope) they hold for the whole text from its start: keys
    once rotated cannot be turned again, and a mixture of two rotations is neither of them.
    """

    inv_freq: Callable[[int], Frequencies]
    factor: float = 1.0

    def table(self, capacity: int, length: int | None = None) -> mx.array:
        """cos and sin of positions 0 .. capacity-1, float32 (capacity, R/2, 2).

        All in float64: float32 would be off by 1e-3 radians at position 9,000. MLX's own cosine is
        no better, so only its products are used: e^i(a+b) = e^ia e^ib, a every BLOCK positions.
        `length`: as above, `capacity` if not given.
        """
        inv_freq = self.inv_freq(length or capacity)
        c, s = (
            mx.array([[row] for row in rows], mx.float64)
            for rows in _turns(range(0, capacity, BLOCK), inv_freq)
        )
        d, t = (
            mx.array([rows], mx.float64) for rows in _turns(range(BLOCK), inv_freq, self.factor)
        )
        # Only a CPU has float64. Each op says so: a default device is that of all threads.
        times = partial(mx.multiply, stream=mx.cpu)
        pairs = [
            mx.subtract(times(c, d), times(s, t), stream=mx.cpu),
            mx.add(times(s, d), times(c, t), stream=mx.cpu),
        ]
        table = mx.stack(pairs, axis=-1, stream=mx.cpu).astype(mx.float32, stream=mx.cpu)
        table = mx.reshape(table, (-1, len(inv_freq), 2), stream=mx.cpu)
        mx.eval(table)  # on a GPU's stream nothing of it is left to do
        return table[:capacity]

    def same(self, length: int, other: int) -> bool:
        """Whether texts of both lengths are rotated alike."""
        return list(self.inv_freq(length)) == list(self.inv_freq(other))


def _turns(
    positions: range, inv_freq: Frequencies, factor: float = 1.0
) -> tuple[list[list[float]], list[list[float]]]:
    """cos and sin of positions * inv_freq, times factor; (P, R/2) each."""
    angles = [[p * f for f in inv_freq] for p in positions]
    cosines = [[math.cos(a) * factor for a in row] for row in angles]
    return cosines, [[math.sin(a) * factor for a in row] for row in angles]


def rope_from(
    config: Config, head_dim: int, *, layer_type: str | None = None, theta: float = 10000.0
) -> Rope:
    """Read the rule: new-style `rope_parameters`, or `rope_theta` and `rope_scaling`.

    head_dim: D; `partial_rotary_factor` says how much of it is rotated. layer_type: given where
    `rope_parameters` has an entry for each type. theta: what a missing rope_theta means.
    """
    for key in ("rope_interleaved", "rope_traditional"):  # other pairs of dims, by config.json
        config.require(key, False)
    theta = config.float("rope_theta", theta, least=TINY)
    share = config.float("partial_rotary_factor", 1.0)
    parameters = config.level("rope_parameters")
    scaling = config.level("rope_scaling") if parameters is None else _own(parameters, layer_type)
    if scaling is None:
        scaling = Config({}, config.where)
    theta = scaling.float("rope_theta", theta, least=TINY)
    share = scaling.float("partial_rotary_factor", share)
    kind = scaling.str("rope_type", scaling.str("type", "default"))
    if kind not in _RULES:
        raise CheckpointError(
            f"{scaling.where}: rope type {kind!r:.80} is not supported "
            f"(known: {', '.join(_RULES)})",
            hint=UPDATE,
        )
    dim = int(head_dim * share)
    if not 2 <= dim <= head_dim or dim % 2:
        raise CheckpointError(
            f"{scaling.where}: partial_rotary_factor {share} of head_dim {head_dim} is {dim} "
            f"dims, must be an even number from 2 to {head_dim}"
        )
    longest = config.int("max_position_embeddings", 2048)
    try:
        rope = _RULES[kind](scaling, config, theta, dim)
        tried = [f for length in (1, longest, 2 * longest) for f in rope.inv_freq(length)]
        if not all(map(math.isfinite, [*tried, rope.factor])):
            raise ValueError
    except (ArithmeticError, ValueError):
        numbers = {**scaling.values, "rope_theta": theta}
        raise CheckpointError(
            f"{scaling.where}: the numbers of rope type {kind!r} make no frequencies: "
            f"{numbers!r:.200}"
        ) from None
    return rope


def no_rope(head_dim: int) -> Rope:
    """Of a layer without positions: every angle is 0, and a rotation by 0 changes no bit.

    As wide as other layers' tables, so that one kernel with one shape serves all of them.
    """
    return _fixed([0.0] * (head_dim // 2))


def _own(parameters: Config, layer_type: str | None) -> Config:
    """`rope_parameters`, or the entry in it where ropes differ between types of layers."""
    nested = sorted(k for k, v in parameters.values.items() if isinstance(v, dict))
    if layer_type is None and not nested:
        return parameters
    entry = parameters.level(layer_type) if layer_type is not None else None
    if entry is None:
        raise CheckpointError(
            f"{parameters.where} has entries for {', '.join(nested) or 'all layers'}, "
            f"but must have one for {layer_type or 'all layers'}"
        )
    return entry


def _plain(theta: float, dim: int) -> Frequencies:
    return [theta ** (-i / dim) for i in range(0, dim, 2)]


def _fixed(inv_freq: Frequencies, factor: float = 1.0) -> Rope:
    return Rope(lambda length: inv_freq, factor)


def _default(scaling: Config, config: Config, theta: float, dim: int) -> Rope:
    return _fixed(_plain(theta, dim))


def _linear(scaling: Config, config: Config, theta: float, dim: int) -> Rope:
    factor = _factor(scaling)
    return _fixed([f / factor for f in _plain(theta, dim)])


def _llama3(scaling: Config, config: Config, theta: float, dim: int) -> Rope:
    factor = _factor(scaling)
    low, high = scaling.float("low_freq_factor"), scaling.float("high_freq_factor")
    original = _original(scaling, config)
    if not 0 < low < high:
        raise CheckpointError(f"{scaling.where}: low_freq_factor must lie under high_freq_factor")

    def stretched(f: float) -> float:
        turns = original * f / (2 * math.pi)  # within the original context
        keep = _clip((turns - low) / (high - low))
        return f * (keep + (1 - keep) / factor)

    return _fixed([stretched(f) for f in _plain(theta, dim)])


def _dynamic(scaling: Config, config: Config, theta: float, dim: int) -> Rope:
    factor, original = _factor(scaling), _original(scaling, config)

    def inv_freq(length: int) -> Frequencies:
        if length <= original:
            return _plain(theta, dim)
        stretch = factor * length / original - (factor - 1)
        return _plain(theta * stretch ** (dim / (dim - 2)), dim)

    return Rope(inv_freq)


def _yarn(scaling: Config, config: Config, theta: float, dim: int) -> Rope:
    original = _original(scaling, config)
    longest = config.int("max_position_embeddings", original)
    if "factor" not in scaling and longest <= original:
        raise CheckpointError(
            f"{scaling.where}: factor is missing, and max_position_embeddings ({longest}) over "
            f"original_max_position_embeddings ({original}) makes none",
            hint=AGAIN,
        )
    factor = _factor(scaling, longest / original)
    fast, slow = scaling.float("beta_fast", 32.0), scaling.float("beta_slow", 1.0)

    def dim_of(turns: float) -> float:
        """The pair that goes round `turns` times within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(fast), dim_of(slow)
    if scaling.bool("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = [_clip((i - low) / max(high - low, 0.001)) for i in range(dim // 2)]
    plain = _plain(theta, dim)
    inv_freq = [f * (1 - r) + f / factor * r for f, r in zip(plain, ramp, strict=True)]

    def magnitude(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = scaling.float("mscale", 0.0), scaling.float("mscale_all_dim", 0.0)
    both = magnitude(above) / magnitude(below) if above and below else magnitude(1.0)
    return _fixed(inv_freq, scaling.float("attention_factor", both, least=TINY))


def _longrope(scaling: Config, config: Config, theta: float, dim: int) -> Rope:
    original = _original(scaling, config)
    longest = config.int("max_position_embeddings", original)
    plain = _plain(theta, dim)
    short, long = (
        [f / by for f, by in zip(plain, scaling.floats(name, dim // 2), strict=True)]
        for name in ("short_factor", "long_factor")
    )
    stretch = scaling.float("factor", longest / original)
    factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    factor = scaling.float("attention_factor", factor, least=TINY)
    return Rope(lambda length: short if length <= original else long, factor)


def _clip(x: float) -> float:
    return min(max(x, 0.0), 1.0)


def _factor(scaling: Config, default: float | None = None) -> float:
    return scaling.float("factor", default, least=TINY)


def _original(scaling: Config, config: Config) -> int:
    """The context the model was first trained with. Phi keeps it beside rope_scaling, not in it."""
    key = "original_max_position_embeddings"
    if key in config:
        return config.int(key)
    return scaling.int(key, config.int("max_position_embeddings", 2048))


_RULES: dict[str, Callable[[Config, Config, float, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "llama3": _llama3,
}
