"""What the command line reads: the prompt, and options that hold more than one value."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from qrun.errors import PromptTooLongError, UsageError

LONGEST = 1 << 26  # bytes of a prompt; no context holds a tenth of it


def read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other")
    if file is not None:
        try:
            with file.open("rb") as opened:
                return _text(opened)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read as UTF-8 text: {error}") from None
    closed = sys.stdin is None  # pyright: ignore[reportUnnecessaryComparison]
    if prompt in (None, "-") and (closed or (prompt is None and sys.stdin.isatty())):
        raise UsageError(
            "no prompt", hint='give one: qrun generate MODEL -p "Why is the sky blue?"'
        )
    if prompt is None or prompt == "-":
        try:
            return _text(sys.stdin.buffer)
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 text: {error}") from None
    return prompt


def _text(source: BinaryIO) -> str:
    """All of it, if it has an end."""
    data = source.read(LONGEST + 1)
    if len(data) > LONGEST:
        raise PromptTooLongError(f"the prompt has more than {LONGEST >> 20} MB")
    return data.decode("utf-8-sig")  # Windows editors put a mark in front


def check_writable(path: Path) -> None:
    """Raises OSError for a file that cannot be written, before there is anything to write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a"):
        pass
    if new:
        path.unlink()


def parse_bias(entries: tuple[str, ...]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise UsageError(f"--logit-bias takes ID=BIAS, not {entry!r}") from None
    return bias
