"""Chat templates: where a checkpoint keeps one, and rendering it in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from qrun.config import AGAIN, refuse_impostors
from qrun.errors import CheckpointError, UsageError
from qrun.lazy import bare

Message = Mapping[str, Any]


def find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template in tokenizer_config.json (a string or a list)."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}", hint=AGAIN) from None
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

    special: bos_token, eos_token and the like. Raises UsageError where the template refuses.
    """
    # jinja2 costs 40 ms to import; a raw prompt need not pay it. Half of that, and 5 MB, are
    # OpenSSL and others for a cache on disk that only its __init__ asks for.
    bare("jinja2")
    from jinja2.exceptions import TemplateError, TemplateSyntaxError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> str:
        raise TemplateError(message)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    functions: dict[str, Any] = {"raise_exception": refuse, "strftime_now": now}
    environment.globals.update(functions)
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **special
        )
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"the model's chat template is broken: {error.message} (line {error.lineno})",
            hint="--raw gives the prompt to the model as it is",
        ) from None
    except Exception as error:  # a template is a program: anything may come out of it
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"the model's chat template fails: {reason}",
            hint="--raw gives the prompt to the model as it is",
        ) from None
