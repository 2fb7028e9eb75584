"""Sampling functions against plain numpy definitions, and the sampler as a whole."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrun.errors import UsageError
from qrun.ops.sample import keep_min_p, keep_top_k, keep_top_p
from qrun.sampling import Sampler, Sampling, penalized

V = 40


def logits_of(seed: int, ties: bool) -> Any:
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 2, V)
    return (np.round(values) if ties else values).astype(np.float32)


def kept(filtered: mx.array) -> set[int]:
    return {int(i) for i in np.flatnonzero(np.isfinite(np.array(filtered)[0]))}


def softmax(logits: Any) -> Any:
    p = np.exp(logits.astype(np.float64) - logits.max())
    return p / p.sum()


SEEDS = st.integers(0, 10_000)


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.booleans(), st.integers(0, V + 5))
def test_top_k(seed: int, ties: bool, k: int) -> None:
    logits = logits_of(seed, ties)
    least = np.sort(logits)[::-1][min(k, V) - 1] if k else -np.inf
    assert kept(keep_top_k(mx.array(logits[None]), k)) == set(np.flatnonzero(logits >= least))


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.floats(0.01, 1.0))
def test_top_p(seed: int, p: float) -> None:
    logits = logits_of(seed, ties=False)
    order = np.argsort(-logits)
    total, want = 0.0, set[int]()
    for i in order:  # by the book: add the likeliest until p is reached
        if total >= p - 1e-6 and want:
            break
        want.add(int(i))
        total += softmax(logits)[i]
    got = kept(keep_top_p(mx.array(logits[None]), p))
    # A sum within float32 noise of p may fall to either side.
    border = abs(sum(softmax(logits)[i] for i in got) - p) < 1e-5 or abs(total - p) < 1e-5
    assert got == want or border


def test_top_p_keeps_the_first_token_however_small_p_is() -> None:
    assert kept(keep_top_p(mx.array([[0.0, 3.0, 2.9]]), 1e-9)) == {1}


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.floats(0.001, 1.0))
def test_min_p(seed: int, p: float) -> None:
    logits = logits_of(seed, ties=False)
    probability = softmax(logits)
    got = kept(keep_min_p(mx.array(logits[None]), p))
    assert {int(i) for i in np.flatnonzero(probability >= p * probability.max() * 1.00001)} <= got
    assert got <= {int(i) for i in np.flatnonzero(probability >= p * probability.max() * 0.99999)}
    assert int(logits.argmax()) in got


def test_filters_off_change_nothing() -> None:
    logits = mx.array(logits_of(3, ties=False)[None])
    for filtered in (
        keep_top_k(logits, 0),
        keep_top_k(logits, V),
        keep_top_p(logits, 1.0),
        keep_min_p(logits, 0.0),
    ):
        assert mx.array_equal(filtered, logits).item()


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties(seed: int, repetition: float, presence: float, frequency: float) -> None:
    rng = np.random.default_rng(seed)
    logits = logits_of(seed, ties=False)
    counts, in_prompt = rng.integers(0, 3, V), rng.integers(0, 2, V).astype(bool)
    s = Sampling(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    want = logits.astype(np.float64)
    for i in range(V):
        if counts[i] or in_prompt[i]:
            want[i] = want[i] / repetition if want[i] > 0 else want[i] * repetition
        want[i] -= frequency * counts[i] + (presence if counts[i] else 0)
    counted = mx.array(counts.astype(np.float32))
    got = penalized(mx.array(logits[None]), counted, mx.array(in_prompt), s)
    assert np.abs(np.array(got)[0] - want).max() < 1e-5


def draw(sampler: Sampler, logits: Any, n: int = 1) -> list[int]:
    row = mx.array(np.asarray(logits, np.float32)[None])
    return [int(sampler(row).item()) for _ in range(n)]


def test_greedy_takes_the_largest() -> None:
    logits = logits_of(1, ties=False)
    assert draw(Sampler(Sampling(), [], V), logits) == [int(logits.argmax())]


def test_draws_follow_the_distribution() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    tokens = draw(Sampler(Sampling(temperature=1.0, seed=7), [], 4), logits, 4000)
    share = np.bincount(tokens, minlength=4) / 4000
    # Four standard deviations of a share near one half: 4 * sqrt(0.25 / 4000).
    assert np.abs(share - [0.5, 0.3, 0.15, 0.05]).max() < 0.032


def test_temperature_sharpens() -> None:
    logits = np.log([0.6, 0.4])
    tokens = draw(Sampler(Sampling(temperature=0.25, seed=3), [], 2), logits, 2000)
    want = 0.6**4 / (0.6**4 + 0.4**4)
    assert abs(tokens.count(0) / 2000 - want) < 4 * np.sqrt(want * (1 - want) / 2000)


def test_filters_limit_what_is_drawn() -> None:
    logits = logits_of(2, ties=False)
    best = set(np.argsort(-logits)[:3])
    s = Sampling(temperature=5.0, top_k=3, seed=1)
    assert set(draw(Sampler(s, [], V), logits, 300)) == best


def test_same_seed_same_draws_and_another_seed_others() -> None:
    logits = np.zeros(V)

    def tokens(seed: int) -> list[int]:
        return draw(Sampler(Sampling(temperature=1.0, seed=seed), [], V), logits, 20)

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(2**64 - 1) == tokens(2**64 - 1)


def test_no_seed_draws_one_and_tells_it() -> None:
    first, second = (Sampler(Sampling(temperature=1.0), [], V) for _ in range(2))
    assert first.seed != second.seed
    again = Sampler(Sampling(temperature=1.0, seed=first.seed), [], V)
    assert draw(again, np.zeros(V), 10) == draw(first, np.zeros(V), 10)


def test_logit_bias_moves_and_forbids() -> None:
    logits = [1.0, 2.0, 3.0, 2.5]
    assert draw(Sampler(Sampling(logit_bias={0: 5.0}), [], 4), logits) == [0]
    assert draw(Sampler(Sampling(logit_bias={2: -100.0}), [], 4), logits) == [3]


def test_repetition_penalty_counts_the_prompt() -> None:
    s = Sampling(repetition_penalty=2.0)
    assert draw(Sampler(s, [2], 4), [1.0, 2.0, 3.0, 2.5]) == [3]


def test_frequency_penalty_counts_what_was_generated() -> None:
    sampler = Sampler(Sampling(frequency_penalty=0.3), [], 3)
    assert draw(sampler, [1.0, 1.2, 1.4], 6) == [2, 1, 2, 0, 1, 2]


def test_case_10_padded_logits_are_never_sampled() -> None:
    logits = np.zeros(V)
    logits[V - 5 :] = 50.0
    assert draw(Sampler(Sampling(), [], V - 5), logits) == [0]
    tokens = draw(Sampler(Sampling(temperature=2.0, seed=1), [], V - 5), logits, 300)
    assert max(tokens) < V - 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"top_p": 0.5, "temperature": 1.0}])
def test_case_05_non_finite_logits_give_minus_one(bad: float, options: dict[str, float]) -> None:
    logits = logits_of(4, ties=False)
    logits[7] = bad
    assert draw(Sampler(Sampling(**options), [], V), logits) == [-1]


def test_large_finite_logits_are_no_overflow() -> None:
    """A sum in the logits' own float16 would overflow where no logit does."""
    row = mx.full((1, V), 6e4, mx.float16)
    assert int(Sampler(Sampling(), [], V)(row).item()) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must be 0, or lie in"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature must be 0, or lie in 1e-6 .. 1e6, but is inf"),
        ({"top_k": -1}, "top_k must be 0 or more"),
        ({"top_p": 0}, "top_p must lie in"),
        ({"top_p": 1.5}, "top_p must lie in"),
        ({"top_p": float("nan")}, "top_p must lie in"),
        ({"min_p": -0.1}, "min_p must lie in"),
        ({"repetition_penalty": 0}, "repetition_penalty must lie in 1e-6 .. 1e6, but is 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty must lie in"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty must lie in"),
        ({"seed": -1}, "seed must lie in"),
        ({"seed": 1 << 64}, "seed must lie in"),
    ],
)
def test_values_out_of_range_are_usage_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, but is 'hot'"),
        ({"temperature": None}, "temperature must be a number, but is None"),
        ({"temperature": True}, "temperature must be a number, but is True"),
        ({"top_p": []}, r"top_p must be a number, but is \[\]"),
        ({"presence_penalty": "a"}, "presence_penalty must be a number"),
        ({"top_k": 1.5}, "top_k must be a whole number, but is 1.5"),
        ({"top_k": None}, "top_k must be a whole number, but is None"),
        ({"seed": "x"}, "seed must be a whole number, but is 'x'"),
        ({"seed": 1.0}, "seed must be a whole number, but is 1.0"),
        ({"logit_bias": None}, "logit_bias must map token ids to numbers, but is None"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {1: "a"}}, "logit_bias must map token ids to numbers"),
    ],
)
def test_values_of_another_type_are_usage_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(**options)


def test_numbers_of_numpy_are_numbers() -> None:
    s = Sampling(temperature=float(np.float32(0.5)), top_k=np.int64(3), logit_bias={np.int32(1): 2})
    assert s == Sampling(temperature=0.5, top_k=3, logit_bias={1: 2.0})


@pytest.mark.parametrize("token", [-1, V])
def test_bias_of_an_unknown_token_is_a_usage_error(token: int) -> None:
    with pytest.raises(UsageError, match=f"token {token} is not in 0 .. {V - 1}"):
        Sampler(Sampling(logit_bias={token: 1.0}), [], V)
