"""sample: the token of the float64 definition, for the same u, on every backend."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import sample
from qrun.ops.sample import sample_ref

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 1e-6},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 300])
def test_draws_as_defined(backend: Any, vocab: int, settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(vocab)
    differ = 0
    for _ in range(40):
        z = rng.normal(0, 3, vocab).astype(np.float32)
        u = np.float32(rng.random())
        got = int(sample(mx.array(z[None]), mx.array([float(u)]), **settings).item())
        assert 0 <= got < vocab
        differ += got != sample_ref(z, float(u), **settings)
    # u may fall within float32 noise of a border between two tokens, but not often.
    assert differ <= 1


def test_rows_are_drawn_apart(backend: Any) -> None:
    z = np.zeros((3, 4), np.float32)
    got = sample(mx.array(z), mx.array([0.1, 0.3, 0.9]), temperature=1.0)
    assert np.array(got).tolist() == [0, 1, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_case_05_minus_one_where_a_logit_is_not_finite(backend: Any, bad: float) -> None:
    z = np.zeros((1, 50), np.float32)
    z[0, 17] = bad
    assert int(sample(mx.array(z), mx.array([0.5]), temperature=1.0).item()) == -1
