"""The exceptions qrun raises on purpose, with exit codes, and perhaps a hint: what to do next."""

from __future__ import annotations

LONGEST = 2000  # characters of a message


class QrunError(Exception):
    """Base of all. `str(error)` is one line that says what is wrong and where."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(one_line(message))
        self.hint = hint


def one_line(text: str) -> str:
    """A broken file may put anything into a message: escapes for what no terminal shows, an end."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


class UsageError(QrunError, ValueError):
    """An argument is out of its range, or arguments contradict each other."""

    exit_code = 2


class ModelNotFoundError(QrunError):
    """No such folder, no such hub repository, or not in the cache while offline."""

    exit_code = 3


class CheckpointError(QrunError):
    """The files are there but cannot be used: damaged, incomplete, contradictory or unsupported."""

    exit_code = 4


class PromptTooLongError(QrunError):
    """The prompt does not fit into the model's context."""

    exit_code = 5


class NonFiniteError(QrunError):
    """The model produced NaN or infinity: continuing would print garbage."""

    exit_code = 6


class BackendError(QrunError):
    """MLX has no backend for this machine, or its native part does not load."""

    exit_code = 7
