"""What the command line prints while it works."""

from __future__ import annotations

import sys

import pytest

from qrun import printing


def test_progress_without_a_terminal_is_a_seldom_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(printing.time, "monotonic", lambda: now)
    show = printing.progress_bar()
    for done in range(1, 6):
        now += 4
        show("converting", done, 10)
    err = capsys.readouterr().err
    assert err == "converting  30%\n"


def test_stages_without_a_terminal_are_seldom_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(printing.time, "monotonic", lambda: now)
    show = printing.status_line()
    for stage in ["qmv 64x64, M = 1", "qmv 64x64, M = 4", "prefill 128", "decode at 512", ""]:
        now += 6
        show(stage)
    assert capsys.readouterr().err == "qmv 64x64, M = 4\ndecode at 512\n"


def test_progress_on_a_terminal_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show = printing.progress_bar()
    show("converting", 1, 2)
    show("converting", 2, 2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.endswith(f"\rconverting   [{30 * '#'}] 100%\n")
