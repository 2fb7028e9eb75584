"""Text -> ids, ids -> text, and text as it streams."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import tokenizers

from qrun.chat import Message, check_messages, check_text, find_template, render
from qrun.config import AGAIN, read_json, refuse_impostors, refuse_non_files
from qrun.errors import CheckpointError, PromptTooLongError, UsageError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A checkpoint's tokenizer.json with its chat template and special tokens."""

    def __init__(self, folder: Path, context: int | None = None) -> None:
        """context: tokens that a prompt must stay below, if it is known."""
        path = folder / "tokenizer.json"
        if not os.path.lexists(path):
            other = [n for n in ("tokenizer.model", "tekken.json") if (folder / n).exists()]
            what = f"only {other[0]}" if other else "no tokenizer"
            raise CheckpointError(
                f"{folder} has {what}; qrun needs tokenizer.json",
                hint="convert it with transformers: AutoTokenizer(...).save_pretrained(...)"
                if other
                else "download tokenizer.json and tokenizer_config.json too",
            )
        refuse_non_files(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}", hint=AGAIN) from None
        refuse_impostors(path, data[:64])
        try:
            self.inner: Any = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain Exception
            why = str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
            raise CheckpointError(
                f"{path} cannot be used: {why.splitlines()[0]}", hint=AGAIN
            ) from None
        self.inner.no_truncation()  # a file may say so, from training: prompts would be cut
        self.inner.no_padding()
        self._context = context
        settings = folder / "tokenizer_config.json"
        config = read_json(settings) if os.path.lexists(settings) else {}
        self.special = {k: _content(config[k]) for k in _SPECIAL if config.get(k)}
        self.template = find_template(folder, config)
        self.eos = self.id_of(self.special.get("eos_token"))
        self.bos = self.id_of(self.special.get("bos_token"))
        added: dict[int, Any] = self.inner.get_added_tokens_decoder()
        self._silent = {i for i, token in added.items() if token.special}

    def id_of(self, token: str | None) -> int | None:
        """The id of a token's exact text, None if there is none."""
        return None if token is None else self.inner.token_to_id(token)

    def size_within(self, rows: int) -> int:
        """One more than the last id below `rows` that means something."""
        known = (i + 1 for i in reversed(range(rows)) if self.inner.id_to_token(i) is not None)
        return next(known, 0)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens the tokenizer adds; never two BOS."""
        self._refuse_endless(text)
        ids: list[int] = self.inner.encode(text).ids
        if self.bos is not None and ids[:2] == [self.bos, self.bos]:
            return ids[1:]
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation through the chat template, which writes every special token itself.

        Without a template: the content of a single message, as a plain prompt.
        """
        if self.template is None:
            check_messages(messages)
            content = messages[0].get("content") if len(messages) == 1 else None
            if not isinstance(content, str):
                raise UsageError(
                    "the model has no chat template: it takes one text, no system message and no "
                    "conversation",
                    hint="put everything into the prompt",
                )
            return self.encode(content)
        text = render(self.template, messages, self.special)
        check_text(text, "what the chat template made")
        self._refuse_endless(text)
        return self.inner.encode(text, add_special_tokens=False).ids

    def _refuse_endless(self, text: str) -> None:
        """Raise for a text that cannot fit, by its length: to tokenize 10 MB takes seconds."""
        if self._context is None or len(text) < 16 * self._context:
            return
        least = len("".join(text.split()).encode()) // self._longest
        if least >= self._context:
            raise PromptTooLongError(
                f"the prompt has {least} tokens or more, the model's context holds "
                f"{self._context}, and one must be left to generate"
            )

    @cached_property
    def _longest(self) -> int:
        """Bytes that a token may stand for, white space not counted: a special one may take in any.

        So large as to refuse nothing where characters can vanish, or run into one unknown token.
        """
        parts: dict[str, Any] = json.loads(self.inner.to_str())
        model, text = parts["model"], json.dumps([parts["normalizer"], parts["pre_tokenizer"]])
        bytewise = '"ByteLevel"' in text or model.get("byte_fallback")
        drops = any(w in text for w in ('"Removed"', '"StripAccents"', '"Bert', '"content": ""'))
        if model["type"] != "BPE" or not bytewise or drops:
            return 1 << 62
        longest = max(len(t.encode()) for t in self.inner.get_vocab(with_added_tokens=True))
        # Normal forms of Unicode put at most four characters into one.
        return longest * (4 if parts["normalizer"] else 1)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def settles(self, token: int) -> bool:
        """Whether the text in front of a token is final once the token has come.

        Not so behind one raw byte, sentencepiece-style, since runs of bytes are decoded as a whole;
        nor behind a token that `decode` leaves out: the run goes on after it.
        """
        text = self.inner.id_to_token(token)
        return text is not None and token not in self._silent and not _BYTE.fullmatch(text)


class StreamingDecoder:
    """Text piece by piece; all pieces joined equal `decode` of all ids.

    A piece is held back while later tokens could still change it: an incomplete character decodes
    to U+FFFD, and a run of byte tokens is decoded as a whole. Each step decodes only the ids since
    the last piece, with the piece before in front, since a decoder may treat the first token of
    a text in its own way (a leading space).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._front = 0  # ids before this are no longer needed
        self._done = 0  # ids before this have been printed
        self._printed = 0  # characters printed

    def add(self, token: int) -> str:
        """The text that is certain after one more token; often empty."""
        self._ids.append(token)
        if not self._tokenizer.settles(token):
            return ""
        before = self._tokenizer.decode(self._ids[self._front : self._done])
        text = self._tokenizer.decode(self._ids[self._front :])
        if text.endswith("\ufffd") or len(text) <= len(before):
            return ""
        if before or self._done == 0:
            self._front = self._done
        self._done = len(self._ids)
        self._printed += len(text) - len(before)
        return text[len(before) :]

    def finish(self) -> str:
        """What was still held back."""
        return self._tokenizer.decode(self._ids)[self._printed :]


class StopFinder:
    """Finds stop strings in streamed text, also across pieces, and prints no part of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not s for s in stops):
            raise UsageError("a stop string must not be empty")
        self._stops = list(stops)
        self._held = ""
        self.found = False

    def add(self, text: str, *, last: bool = False) -> str:
        """The part of the text so far that can be printed. After a find: nothing more."""
        if self.found:
            return ""
        self._held += text
        # The one completed first counts, so that the result does not depend on how text is cut.
        found = [(i + len(s), i) for s in self._stops if (i := self._held.find(s)) >= 0]
        if found:
            self.found = True
            return self._held[: min(found)[1]]
        keep = 0 if last else self._undecided()
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return ready

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        longest = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:n]):
                    longest = n
                    break
        return longest


def _content(value: Any) -> str:
    """A special token's text: written plainly, or as an added-token object."""
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).get("content", "")
    # Half a surrogate pair, which no tokenizer takes, becomes its escape, which is no token's text.
    return str(value).encode(errors="backslashreplace").decode()
