"""The exceptions of qrun: one line of what went wrong, and a hint of what to do."""


class QrunError(Exception):
    """What every error raised by qrun derives from."""

    exit_code: int = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(QrunError):
    """The request itself is wrong."""

    exit_code = 2


class CheckpointError(QrunError):
    """The model's files are wrong."""

    exit_code = 4
