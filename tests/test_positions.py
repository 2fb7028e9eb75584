"""Rope of every type, in both config styles, against float64 at far positions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun import ops
from qrun.cache import Cache, CacheSpec
from qrun.config import Config
from qrun.errors import CheckpointError, UsageError
from qrun.positions import no_rope, rope_from
from tests import reference, zoo

D = 64
BASE = {"model_type": "llama", "rope_theta": 10000.0, "max_position_embeddings": 16384}
LONG = {"short_factor": [1 + i / 50 for i in range(32)], "long_factor": [2 + i for i in range(32)]}
RULES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {
        "rope_type": "dynamic",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **LONG},
}


def config(**values: Any) -> Config:
    return Config({**BASE, **values}, "config.json")


@pytest.mark.parametrize("kind", RULES)
def test_position_9000(kind: str, backend: Any) -> None:
    """q and k rotated at position 9,000: within 1e-3 radians of float64."""
    rope = rope_from(config(rope_scaling=RULES[kind]), D)
    planned = 9001
    cache = Cache([CacheSpec(1, D, rope)], planned, mx.float32)
    cache.advance(planned - 1)
    x = np.random.default_rng(3).normal(size=(1, 3 * D)).astype(np.float32)
    q, keys, _ = ops.rope(
        mx.array(x), cache.keys[0], cache.values[0], cache.offset, cache.tables[0], heads=1
    )
    inv_freq, factor = reference.frequencies({**BASE, "rope_scaling": RULES[kind]}, D, False, 9001)
    for got, row in ((q[0, 0, 0], x[0, :D]), (keys[0, 0, planned - 1], x[0, D : 2 * D])):
        pairs = row[: D // 2].astype(np.float64) + 1j * row[D // 2 :]
        turned = pairs * np.exp(1j * (planned - 1) * inv_freq) * factor
        values = np.array(got, np.float64)
        error = np.abs(values[: D // 2] + 1j * values[D // 2 :] - turned)
        assert (error <= 1e-3 * np.abs(turned)).all()


def test_the_table_is_float64s_rounded_once() -> None:
    rope = rope_from(config(), D)
    angle = np.arange(9001)[:, None] * np.array(rope.inv_freq(1))
    want = np.stack([np.cos(angle), np.sin(angle)], -1)
    assert np.abs(np.array(rope.table(9001), np.float64) - want).max() <= 2.0**-25 + 1e-11


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("length", [300, 9001])
def test_frequencies(kind: str, length: int) -> None:
    inv_freq, factor = reference.frequencies(
        {**BASE, "rope_scaling": RULES[kind]}, D, False, length
    )
    rope = rope_from(config(rope_scaling=RULES[kind]), D)
    np.testing.assert_allclose(rope.inv_freq(length), inv_freq, rtol=1e-12)
    assert rope.factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("kind", RULES)
def test_both_styles_mean_the_same(kind: str) -> None:
    """rope_parameters replaces rope_theta and rope_scaling, and `type` is an old `rope_type`."""
    rule = RULES[kind]
    old = {("type" if k == "rope_type" else k): v for k, v in rule.items()}
    one = rope_from(config(rope_theta=5e5, rope_scaling=old), D)
    two = rope_from(
        config(
            rope_theta=1.0,
            rope_scaling={"type": "linear", "factor": 77.0},
            rope_parameters={**rule, "rope_theta": 5e5},
        ),
        D,
    )
    for length in (300, 9001):
        np.testing.assert_array_equal(one.inv_freq(length), two.inv_freq(length))
    assert one.factor == two.factor


def test_nested_by_layer_type() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    both = config(rope_parameters=nested)
    full = rope_from(both, D, layer_type="full_attention")
    local = rope_from(both, D, layer_type="sliding_attention")
    np.testing.assert_allclose(full.inv_freq(9), 1e6 ** (-np.arange(0, D, 2) / D) / 4, rtol=1e-14)
    np.testing.assert_allclose(local.inv_freq(9), 5e3 ** (-np.arange(0, D, 2) / D), rtol=1e-14)
    for layer_type in (None, "chunked_attention"):
        with pytest.raises(CheckpointError, match="full_attention, sliding_attention"):
            rope_from(both, D, layer_type=layer_type)
    with pytest.raises(CheckpointError, match="must have one for full_attention"):
        rope_from(config(rope_parameters={"rope_theta": 1e6}), D, layer_type="full_attention")


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["ntk", "mrope", "proportional"])
def test_an_unknown_type_is_refused(style: str, kind: str) -> None:
    """Never theta = 10000 instead."""
    with pytest.raises(CheckpointError, match=f"rope type '{kind}' is not supported"):
        rope_from(config(**{style: {"rope_type": kind, "factor": 2.0}}), D)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        (
            {"rope_type": "linear", "factor": 0},
            "factor must be a finite number, 1e-30 or more, but is 0",
        ),
        ({"rope_type": "linear", "factor": "4"}, "factor must be a finite number"),
        (
            {"rope_type": "linear", "factor": 2.0, "rope_theta": -1},
            "rope_theta must be a finite number",
        ),
        ({"rope_type": "yarn"}, r"factor is missing, and max_position_embeddings \(16384\) over"),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32768},
            r"original_max_position_embeddings \(32768\) makes none",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}, "make no frequencies"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1.0}, "make no frequencies"),
        ({**RULES["llama3"], "high_freq_factor": 1.0}, "low_freq_factor must lie under"),
        ({**RULES["longrope"], "long_factor": [1.0]}, "long_factor must be a list of 32"),
        ({**RULES["longrope"], "short_factor": [0.0] * 32}, "make no frequencies"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "even number from 2 to 64"),
        ({"rope_type": "default", "partial_rotary_factor": 0.0}, "is 0 dims, must be"),
    ],
)
def test_nonsense_is_one_error(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rope_from(config(rope_parameters=rule), D)


@pytest.mark.parametrize("style", ["beside", "inside"])
def test_partial_rotation(style: str, backend: Any) -> None:
    """A quarter of the head is rotated, the rest passes as it is."""
    share = {"partial_rotary_factor": 0.25}
    values = share if style == "beside" else {"rope_parameters": {"rope_theta": 1e4, **share}}
    rope = rope_from(config(**values), D)
    cache = Cache([CacheSpec(1, D, rope)], 100, mx.float32)
    cache.advance(50)
    x = mx.random.normal((1, 3 * D), key=mx.random.key(0))
    q, _, _ = ops.rope(x, cache.keys[0], cache.values[0], cache.offset, cache.tables[0], heads=1)
    inv_freq = 1e4 ** (-np.arange(0, 16, 2) / 16)
    row = np.array(x[:, :D])[None, None]
    want = reference.rotated(np.repeat(row[0], 51, 1), inv_freq, 1.0, pairs=False)[0, 50]
    np.testing.assert_allclose(np.array(q[0, 0, 0]), want, atol=1e-5)
    assert mx.array_equal(q[0, 0, 0, 16:], x[0, 16:D])


def test_no_rope_changes_no_bit(backend: Any) -> None:
    cache = Cache([CacheSpec(1, D, no_rope(D))], 100, mx.float32)
    cache.advance(50)
    x = mx.random.normal((1, 3 * D), key=mx.random.key(0))
    q, keys, _ = ops.rope(x, cache.keys[0], cache.values[0], cache.offset, cache.tables[0], heads=1)
    assert mx.array_equal(q[0, 0, 0], x[0, :D])
    assert mx.array_equal(keys[0, 0, 50], x[0, D : 2 * D])


def test_longrope_goes_by_the_planned_length() -> None:
    """Short factors up to the original length; beyond it long ones, for all of the text."""
    rope = rope_from(config(rope_scaling=RULES["longrope"]), D)
    plain = 1e4 ** (-np.arange(0, D, 2) / D)
    np.testing.assert_allclose(rope.inv_freq(4096), plain / LONG["short_factor"])
    np.testing.assert_allclose(rope.inv_freq(4097), plain / LONG["long_factor"])
    specs = [CacheSpec(1, D, rope)]
    for planned, name in ((4096, "short_factor"), (4097, "long_factor")):
        table = np.array(Cache(specs, planned, mx.float32).tables[0][1])
        angle = plain / LONG[name]
        np.testing.assert_allclose(table[:, 0], np.cos(angle) * rope.factor, rtol=1e-6)


def test_a_cache_never_mixes_two_rotations() -> None:
    """Growing past the original length is refused while keys are held, and fine before."""
    specs = [CacheSpec(1, D, rope_from(config(rope_scaling=RULES["longrope"]), D))]
    cache = Cache(specs, 1000, mx.float32)
    cache.advance(900)
    cache.reserve(4096)
    assert cache.capacity >= 4096
    with pytest.raises(UsageError, match="5000 positions is rotated otherwise"):
        cache.reserve(5000)
    fresh = Cache(specs, 1000, mx.float32)
    fresh.reserve(5000)
    assert mx.array_equal(fresh.tables[0], Cache(specs, 5000, mx.float32).tables[0])


def test_a_step_reads_no_more_than_the_window() -> None:
    """--stats and the roofline go by it."""
    rope = rope_from(config(), D)
    cache = Cache([CacheSpec(2, D, rope, 100), CacheSpec(2, D, rope)], 300, mx.float32)
    for length, window in ((80, 80), (290, 100)):
        cache.advance(length - cache.length)
        assert cache.bytes_held() == 2 * 2 * D * 4 * (window + length)


def test_a_growing_cache_keeps_what_it_holds() -> None:
    specs = [CacheSpec(2, D, rope_from(config(), D))]
    cache = Cache(specs, 10, mx.float32)
    cache.keys[0] = mx.ones_like(cache.keys[0])
    cache.advance(10)
    held = cache.capacity
    cache.reserve(held + 1)
    assert cache.keys[0].shape == (1, 2, cache.capacity, D)
    assert mx.all(cache.keys[0][:, :, :held] == 1)
    assert mx.all(cache.keys[0][:, :, held:] == 0)


def test_original_length_beside_or_inside() -> None:
    """phi3 writes original_max_position_embeddings beside rope_scaling; there it counts."""
    rule = {**RULES["longrope"], "original_max_position_embeddings": 99}
    beside = config(rope_scaling=rule, original_max_position_embeddings=4096)
    assert rope_from(beside, D).same(4096, 100)
    assert not rope_from(beside, D).same(4096, 4097)


def test_yarn_without_a_factor_takes_that_of_the_contexts() -> None:
    bare = {key: value for key, value in RULES["yarn"].items() if key != "factor"}
    rule, same = (rope_from(config(rope_scaling=r), D) for r in (bare, RULES["yarn"]))
    assert BASE["max_position_embeddings"] == 4 * RULES["yarn"]["original_max_position_embeddings"]
    assert rule.inv_freq(1) == same.inv_freq(1)
    assert rule.factor == same.factor


def test_yarn_magnitudes() -> None:
    """attention_factor, else mscale over mscale_all_dim where both count, else 0.1 ln(s) + 1."""
    plain = 0.1 * np.log(4) + 1

    def factor(**more: float) -> float:
        return rope_from(config(rope_scaling={**RULES["yarn"], **more}), D).factor

    assert factor() == pytest.approx(plain)
    assert factor(mscale=1.0) == pytest.approx(plain)
    assert factor(mscale=1.0, mscale_all_dim=0.0) == pytest.approx(plain)
    assert factor(mscale=0.707, mscale_all_dim=0.707) == 1.0
    assert factor(attention_factor=0.5, mscale=1.0, mscale_all_dim=2.0) == 0.5


def test_zoo_has_every_rule() -> None:
    """The models of test_models.py go through each rule, too."""
    used = {
        (rule.get("rope_type") or rule.get("type"))
        for case in zoo.CASES.values()
        for rule in (case.get("rope_scaling"), case.get("rope_parameters"))
        if rule
    }
    assert set(RULES) - {"default"} <= used
