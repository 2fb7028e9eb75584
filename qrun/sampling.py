"""From logits to a token: logit bias and penalties here, then the ops `argmax` or `sample`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, cast

import mlx.core as mx

from qrun import ops
from qrun.errors import UsageError
from qrun.lazy import np


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The default is greedy. Raises UsageError for a value out of range.

    temperature: 0 is greedy. top_k: keep the k likeliest, 0: all. top_p: keep the likeliest that
    together reach p (Holtzman et al., 2020). min_p: keep those of at least p times the likeliest.
    repetition_penalty: logits of tokens in prompt or text are divided (positive) or multiplied
    (negative) by it (Keskar et al., 2019). presence_penalty, frequency_penalty: subtracted once,
    or once per occurrence, for tokens generated so far. logit_bias: token id -> added to its logit.
    seed: same seed, same text; None draws one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise UsageError(text)

        for name in _NUMBERS:
            value = getattr(self, name)
            need(_is(value, Real), f"{name} must be a number, but is {value!r:.80}")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            ok = _is(value, Integral) or (name == "seed" and value is None)
            need(ok, f"{name} must be a whole number, but is {value!r:.80}")
        bias: Any = self.logit_bias
        ok = isinstance(bias, Mapping) and all(
            _is(k, Integral) and _is(v, Real) for k, v in cast("Mapping[Any, Any]", bias).items()
        )
        need(ok, f"logit_bias must map token ids to numbers, but is {bias!r:.80}")
        need(
            self.temperature == 0 or 1e-6 <= self.temperature <= 1e6,
            f"temperature must be 0, or lie in 1e-6 .. 1e6, but is {self.temperature}",
        )
        need(self.top_k >= 0, f"top_k must be 0 or more, but is {self.top_k}")
        need(0 < self.top_p <= 1, f"top_p must lie in (0, 1], but is {self.top_p}")
        need(0 <= self.min_p <= 1, f"min_p must lie in [0, 1], but is {self.min_p}")
        need(
            1e-6 <= self.repetition_penalty <= 1e6,
            f"repetition_penalty must lie in 1e-6 .. 1e6, but is {self.repetition_penalty}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            need(abs(value) <= 1e6, f"{name} must lie in -1e6 .. 1e6, but is {value}")
        need(
            self.seed is None or 0 <= self.seed < 1 << 64,
            f"seed must lie in 0 .. 2**64-1, but is {self.seed}",
        )


_NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def _is(value: object, kind: type) -> bool:
    """Whether it is such a number; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


class Sampler:
    """One generation's choices. Keeps what penalties need: counts of tokens, on the device."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], vocab: int) -> None:
        """vocab: ids at or above it are never chosen (logits may be wider than the tokenizer)."""
        self.sampling = s = sampling
        self.vocab = vocab
        for token, value in s.logit_bias.items():
            if not 0 <= token < vocab:
                raise UsageError(f"logit_bias: token {token} is not in 0 .. {vocab - 1}")
            if not abs(value) <= 1e6:
                raise UsageError(
                    f"logit_bias of token {token} must lie in -1e6 .. 1e6, but is {value}"
                )
        self.bias: mx.array | None = None
        if s.logit_bias:
            bias = np.zeros(vocab, np.float32)
            bias[list(s.logit_bias)] = list(s.logit_bias.values())
            self.bias = mx.array(bias)
        self.seed = int.from_bytes(os.urandom(4), "little") if s.seed is None else s.seed
        self.key = mx.random.key(self.seed)
        self.counts: mx.array | None = None  # of generated tokens, float32 (V,)
        self.in_prompt: mx.array | None = None
        if s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty:
            self.counts = mx.array(np.zeros(vocab, np.float32))
            seen = np.zeros(vocab, np.bool_)
            seen[[i for i in prompt if i < vocab]] = True
            self.in_prompt = mx.array(seen.tolist())
        mx.eval(self.state)

    def __call__(self, logits: mx.array) -> mx.array:
        """logits (1, V) -> the token, int32 (1,); -1 if any logit is NaN or infinite."""
        s = self.sampling
        if self.greedy:
            return self.likeliest(logits)
        if logits.shape[-1] > self.vocab:
            logits = logits[:, : self.vocab]
        if self.bias is not None:
            logits = logits + self.bias
        if self.counts is not None and self.in_prompt is not None:
            logits = penalized(logits, self.counts, self.in_prompt, s)
        if s.temperature == 0:
            token = self.likeliest(logits)
        else:
            self.key, key = mx.random.split(self.key)
            token = ops.sample(
                logits,
                mx.random.uniform(shape=(logits.shape[0],), key=key),
                temperature=s.temperature,
                top_k=s.top_k,
                top_p=s.top_p,
                min_p=s.min_p,
            )
        if self.counts is not None:
            self.counts = self.counts.at[token].add(1)
        return token

    @property
    def state(self) -> list[mx.array]:
        """What the next choice needs of this one. To be evaluated with it: what is not belongs to
        the thread that asked for it, and the next may be asked for by another.
        """
        return [self.key] if self.counts is None else [self.key, self.counts]

    @property
    def greedy(self) -> bool:
        """Whether `likeliest` is all there is to it: no state, no chance."""
        return not self.sampling.temperature and self.counts is None and self.bias is None

    def likeliest(self, logits: mx.array) -> mx.array:
        """logits (1, V) -> the token, int32 (1,), by nothing but them; -1 as above."""
        return ops.argmax(logits, min(self.vocab, logits.shape[-1]))


def penalized(logits: mx.array, counts: mx.array, in_prompt: mx.array, s: Sampling) -> mx.array:
    """Repetition, frequency and presence penalties; counts and in_prompt (V,)."""
    generated = counts > 0
    if s.repetition_penalty != 1:
        weaker = mx.where(logits > 0, 1 / s.repetition_penalty, s.repetition_penalty)
        logits = mx.where(generated | in_prompt, logits * weaker, logits)
    return logits - counts * s.frequency_penalty - generated * s.presence_penalty
