"""Chat templates: where a checkpoint keeps one, and rendering it in a sandbox."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from qrun.config import AGAIN, refuse_impostors, refuse_non_files
from qrun.errors import CheckpointError, UsageError
from qrun.lazy import bare

Message = Mapping[str, Any]
RAW = "--raw gives the prompt to the model as it is"


def find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template in tokenizer_config.json (a string or a list)."""
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):  # also a broken link: without its template a model talks nonsense
        refuse_non_files(file)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{file} cannot be read: {why}", hint=AGAIN) from None
        refuse_impostors(file, text[:64].encode())
        return text
    template = tokenizer_config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, list):
        named = {
            t["name"]: t["template"]
            for t in cast("list[Any]", template)
            if isinstance(t, dict) and "name" in t and "template" in t
        }
        if isinstance(named.get("default"), str):
            return named["default"]
    raise CheckpointError(
        f"{folder / 'tokenizer_config.json'}: chat_template has no usable default",
        hint="give it one: a string, or a list with an entry named default",
    )


def render(template: str, messages: Sequence[Message], special: Mapping[str, str]) -> str:
    """The prompt text for messages, ending where the assistant's answer begins.

    special: bos_token, eos_token and the like. Raises UsageError where the template refuses the
    messages, CheckpointError where it is broken, fails, or does not come to an end.
    """
    # jinja2 costs 40 ms to import; a raw prompt need not pay it. Half of that, and 5 MB, are
    # OpenSSL and others for a cache on disk that only its __init__ asks for.
    bare("jinja2")
    from jinja2.exceptions import TemplateSyntaxError

    from qrun.sandbox import STEP, Sandbox

    def refuse(message: str) -> str:
        raise _RefusedError(message)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As templates know it from transformers, which escapes nothing for HTML."""
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    check_messages(messages)
    system = any(m.get("role") == "system" for m in messages)
    hint = f"leave out --system; {RAW}" if system else RAW
    sandbox = Sandbox(template, sum(STEP + len(str(m.get("content", ""))) for m in messages))
    sandbox.add({"tojson": tojson}, {"raise_exception": refuse, "strftime_now": now})
    try:
        text = sandbox.text(messages=list(messages), add_generation_prompt=True, **special)
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"the model's chat template is broken: {error.message} (line {error.lineno})",
            hint=hint,
        ) from None
    except _RefusedError as error:
        raise UsageError(
            f"the model's chat template refuses: {_first_line(error)}", hint=hint
        ) from None
    except Exception as error:  # a template is a program: anything may come out of it
        for i, message in enumerate(messages):
            if not isinstance(content := message.get("content"), str):
                raise UsageError(
                    f"the model's chat template does not take the content of message {i}, which "
                    f"is no text: {content!r:.80}"
                ) from None
        raise CheckpointError(
            f"the model's chat template fails: {_first_line(error)}", hint=hint
        ) from None
    if not text:
        raise CheckpointError("the model's chat template makes no text of the messages", hint=hint)
    return text


class _RefusedError(Exception):
    """What a template says of messages that it does not take."""


def check_messages(messages: Sequence[Message]) -> None:
    """Raise UsageError for what no template could read."""
    for i, message in enumerate(cast("Sequence[Any]", messages)):
        ok = isinstance(message, Mapping)
        if ok:
            role, content = (cast("Message", message).get(key) for key in ("role", "content"))
            ok = isinstance(role, str) and isinstance(content, (str, list, tuple, type(None)))
            ok = ok and (content is not None or len(cast("Message", message)) > 1)
        if not ok:
            raise UsageError(f"a message is a mapping with role and content, not {message!r:.80}")
        for key in ("role", "content"):
            check_text(message.get(key), f"message {i}: its {key}")


def check_text(text: Any, what: str) -> None:
    """Raise UsageError for half of a surrogate pair, which no tokenizer takes.

    Python makes them of a command line's bytes that are not UTF-8, and of a JSON text's escapes.
    """
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{what} is not UTF-8 text: character {error.start} is {text[error.start]!r}"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
