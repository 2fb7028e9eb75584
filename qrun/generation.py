"""From a prompt to text: chunked prefill, then decode with the next step already enqueued."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, cast

import mlx.core as mx

from qrun.cache import Cache
from qrun.chat import Message, check_text
from qrun.errors import CheckpointError, NonFiniteError, PromptTooLongError, UsageError
from qrun.loader import LoadedModel
from qrun.ops import _launch
from qrun.ops._launch import Arrays, Step
from qrun.sampling import Sampler, Sampling
from qrun.tokenizer import StopFinder, StreamingDecoder

DEFAULT_MAX_TOKENS = 512

FinishReason = Literal["stop", "length"]
Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True)
class Timings:
    """Seconds on the clock. Prefill ends when the first token is known."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Generation:
    """A finished text. `tokens` are the generated ids, without the one that ended the text.

    finish_reason: "stop" (an end token or a stop string) or "length" (max_tokens, or the context).
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    timings: Timings
    seed: int
    cache_bytes: int = field(default=0)  # that a step read, on average
    decode_steps: int = 0  # a token each: the prefill makes the first, an end token counts too

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.timings.prefill if self.timings.prefill else 0.0

    @property
    def decode_rate(self) -> float:
        """Decode steps a second."""
        return self.decode_steps / self.timings.decode if self.timings.decode else 0.0


@dataclass(frozen=True)
class Piece:
    """A piece of text as it comes. The last one carries the result; its text may be empty."""

    text: str
    result: Generation | None = None


def generate(
    model: LoadedModel,
    prompt: Prompt,
    *,
    system: str | None = None,
    raw: bool = False,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    stop: str | Sequence[str] = (),
    sampling: Sampling | None = None,
) -> Generation:
    """The whole text at once. Arguments and errors as `stream`."""
    result = None
    for piece in stream(
        model,
        prompt,
        system=system,
        raw=raw,
        max_tokens=max_tokens,
        stop=stop,
        sampling=sampling,
    ):
        result = piece.result
    assert result is not None
    return result


def stream(
    model: LoadedModel,
    prompt: Prompt,
    *,
    system: str | None = None,
    raw: bool = False,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    stop: str | Sequence[str] = (),
    sampling: Sampling | None = None,
) -> Iterator[Piece]:
    """Generate text piece by piece; the last piece carries the Generation.

    prompt: a user's message; or messages ({"role", "content"}, ...); or token ids.
    system: a system message in front. raw: no chat template. stop: strings that end the text and
    are not part of it. Never splits a character, never prints part of a stop string.
    Raises UsageError, PromptTooLongError, NonFiniteError.
    """
    stops = _checked(model, max_tokens, stop, sampling)
    ids = encode_prompt(model, prompt, system=system, raw=raw)
    if len(ids) >= model.context:
        raise PromptTooLongError(
            f"the prompt has {len(ids)} tokens, the model's context holds {model.context}, "
            "and one must be left to generate"
        )
    room = min(int(max_tokens), model.context - len(ids))
    sampler = Sampler(sampling or Sampling(), ids, model.vocab)
    return _run(model, ids, room, StopFinder(stops), sampler)


def _checked(model: Any, max_tokens: Any, stop: Any, sampling: Any) -> list[str]:
    """The stop strings. Raises UsageError for an argument of another type."""
    if not isinstance(model, LoadedModel):
        raise UsageError(f"the model must be one that qrun.load returned, not {model!r:.80}")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, Integral) or max_tokens < 0:
        raise UsageError(f"max_tokens must be a whole number, 0 or more, but is {max_tokens!r:.80}")
    if not isinstance(sampling, Sampling | None):
        raise UsageError(f"sampling must be a qrun.Sampling, not {sampling!r:.80}")
    stops = [stop] if isinstance(stop, str) else stop
    ok = isinstance(stops, Sequence) and not isinstance(stops, bytes)
    if not ok or not all(isinstance(s, str) for s in cast("Sequence[Any]", stops)):
        raise UsageError(f"stop must be a text or a list of texts, not {stop!r:.80}")
    return list(cast("Sequence[str]", stops))


def encode_prompt(
    model: LoadedModel, prompt: Prompt, *, system: str | None, raw: bool
) -> list[int]:
    """Token ids of any form of prompt."""
    vocab = model.vocab
    for name, text in (("prompt", prompt), ("system message", system)):
        check_text(text, f"the {name}")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UsageError("the prompt is empty")
        if raw:
            if system is not None:
                raise UsageError("a raw prompt takes no system message")
            ids = model.tokenizer.encode(prompt)
        else:
            ids = model.tokenizer.encode_chat(
                _messages(system, [{"role": "user", "content": prompt}])
            )
    elif isinstance(prompt, bytes) or not isinstance(prompt, Sequence):  # pyright: ignore
        raise UsageError(
            "a prompt is a text, a list of messages, or a list of token ids, "
            f"not of type {type(prompt).__name__}"
        )
    elif all(isinstance(item, Integral) for item in prompt):  # numpy's too
        if system is not None:
            raise UsageError("token ids take no system message")
        ids = [int(item) for item in cast("list[int]", prompt)]
        for token in ids:
            if not 0 <= token < vocab:
                raise UsageError(f"prompt: token {token} is not in 0 .. {vocab - 1}")
    elif raw:
        raise UsageError("a raw prompt is a text or a list of token ids, not messages")
    else:
        messages = cast("list[Message]", list(prompt))
        ids = model.tokenizer.encode_chat(_messages(system, messages))
    if not ids:
        raise UsageError("the prompt is empty")
    if max(ids) >= vocab:
        raise CheckpointError(
            f"the prompt holds token {max(ids)}, the model knows those up to {vocab - 1}",
            hint="tokenizer and weights may be of two models",
        )
    return ids


def _messages(system: str | None, rest: list[Message]) -> list[Message]:
    return rest if system is None else [{"role": "system", "content": system}, *rest]


def _run(
    model: LoadedModel, ids: list[int], room: int, stops: StopFinder, sampler: Sampler
) -> Iterator[Piece]:
    """The loop. While a token is read, the step that consumes it is already under way."""
    started = time.perf_counter()
    decoder = StreamingDecoder(model.tokenizer)
    tokens: list[int] = []
    pieces: list[str] = []
    reason: FinishReason = "length"
    cache = model.new_cache(len(ids) + room)
    first, read, n = started, 0, 0
    if room:
        token = prefill(model, ids, cache, sampler)
        read = cache.bytes_held()
        step = decode_step(model, cache, sampler)
        for n in range(room):
            upcoming = step(token) if n + 1 < room else None
            value = int(cast(int, token.item()))
            if n == 0:
                first = time.perf_counter()
            if value < 0:
                raise NonFiniteError(
                    f"the model's logits are not finite after {n} token{'s' * (n != 1)}",
                    hint="the weights may be damaged"
                    if model.dtype == mx.float32
                    else "this may be overflow: try --dtype float32",
                )
            if value in model.eos:
                reason = "stop"
                break
            tokens.append(value)
            text = stops.add(decoder.add(value))
            if text:
                pieces.append(text)
                yield Piece(text)
            if stops.found:
                reason = "stop"
                break
            if upcoming is None:
                break
            token = upcoming
    ended = time.perf_counter()
    rest = stops.add(decoder.finish(), last=True)
    if stops.found:
        reason = "stop"
    pieces.append(rest)
    result = Generation(
        text="".join(pieces),
        tokens=tokens,
        finish_reason=reason,
        prompt_tokens=len(ids),
        timings=Timings(first - started, ended - first),
        seed=sampler.seed,
        cache_bytes=(read + cache.bytes_held()) // 2,
        decode_steps=n,
    )
    yield Piece(rest, result)


Choice = Callable[[mx.array], mx.array]


def prefill(
    model: LoadedModel, ids: Sequence[int], cache: Cache, sampler: Sampler | None = None
) -> mx.array:
    """Feed ids to the cache, chunk by chunk -> logits (1, V) behind the last one.

    With a sampler -> the token that it takes, int32 (1,). Either is under way when this returns.
    """
    backend = _launch.backend()
    last = len(ids) - 1
    inside, behind = _choices(sampler)
    outputs: Arrays = []
    for start in range(0, len(ids), backend.PREFILL_ROWS):
        chunk = mx.array(list(ids[start : start + backend.PREFILL_ROWS]), mx.int32)
        step = forward(model, cache, inside if start + chunk.size > last else None)
        outputs, state = backend.once(step)([chunk, cache.offset], cache.state)
        cache.hold(state)
        cache.advance(chunk.size)
    return behind(outputs[0])


def decode_step(model: LoadedModel, cache: Cache, sampler: Sampler | None = None) -> Choice:
    """A function token (1,) -> the next token (1,) that appends to the cache.

    Without a sampler -> logits (1, V). Either is under way when it returns. Traced once and
    replayed where the backend allows it: every step has the same shapes, and the position is data.
    """
    inside, behind = _choices(sampler)
    run = _launch.backend().traced(forward(model, cache, inside))

    def advance(token: mx.array) -> mx.array:
        outputs, state = run([token, cache.offset], cache.state)
        cache.hold(state)
        cache.advance(1)
        return behind(outputs[0])

    return advance


def forward(model: LoadedModel, cache: Cache, choose: Choice | None) -> Step:
    """(tokens (L,), offset), cache.state -> (choose(the last one's logits (1, V)),), cache.state.

    choose None: no result, the cache is what counts.
    """

    def step(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        tokens, offset = inputs
        seen = cache.bound(state, offset)
        hidden = model.model(tokens, seen)
        if choose is None:
            return [], seen.state
        if hidden.shape[0] > 1:
            hidden = hidden[-1:]
        return [choose(model.model.logits(hidden))], seen.state

    return step


def _choices(sampler: Sampler | None) -> tuple[Choice, Choice]:
    """What to make of logits inside a step, where it is replayed with it, and behind."""

    def nothing(result: mx.array) -> mx.array:
        return result

    if sampler is None:
        return nothing, nothing
    if sampler.greedy:
        return sampler.likeliest, nothing

    def sampled(logits: mx.array) -> mx.array:
        token = sampler(logits)
        mx.async_eval(token, sampler.state)
        return token

    return nothing, sampled
