"""Messages: whatever a broken file puts into one, it is a line that a terminal can show."""

from __future__ import annotations

import pytest

from qrun.errors import LONGEST, CheckpointError, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größe 你好 🙂", "größe 你好 🙂"),
        ("a\nb\tc\x00", "a\\nb\\tc\\x00"),
        ("lone \ud800", "lone \\ud800"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u2028", "\\u2028"),
    ],
)
def test_what_no_terminal_shows_is_escaped(text: str, shown: str) -> None:
    assert one_line(text) == shown == str(CheckpointError(text))


def test_long_messages_have_an_end() -> None:
    assert len(str(CheckpointError("x" * 10**6))) == LONGEST
    assert one_line("x" * LONGEST) == "x" * LONGEST
