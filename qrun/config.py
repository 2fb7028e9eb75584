"""config.json with typed access: a wrong or missing value is one line that names key and file."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from qrun.errors import CheckpointError

AGAIN = "download the file again"
TINY, HUGE = 1e-30, 1e30  # the least number that counts as positive, the largest of any
UPDATE = "update qrun, or take a model without it"


def refuse_impostors(path: Path, first: bytes) -> None:
    """Raise for what a failed download leaves under a file's name; first: how the file begins."""
    if not first:
        raise CheckpointError(f"{path} is empty", hint=AGAIN)
    if first.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a git-lfs pointer, not the file", hint="run: git lfs pull"
        )
    if first.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(f"{path} is a web page, not the file", hint=AGAIN)


def refuse_non_files(path: Path) -> None:
    """Raise for a folder, pipe, socket or device under a file's name: reading some never ends."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    try:
        kind = kinds.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:  # an interrupted download leaves such a link; else, whoever opens it says why
        kind = "a broken link" if path.is_symlink() else None
    if kind:
        raise CheckpointError(f"{path} is {kind}, not a file", hint=AGAIN)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError naming the file and the fault."""
    refuse_non_files(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors put a mark in front
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing", hint="give a model's folder, or download the model again"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", hint=AGAIN) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint=AGAIN) from None
    refuse_impostors(path, text[:64].encode())
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", hint=AGAIN) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, not {type(value).__name__}", hint=AGAIN
        )
    return cast("dict[str, Any]", value)


class Config:
    """One level of a checkpoint's configuration.

    Every key that a reader asks for is remembered, so that `unread()` can tell what was ignored.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = dict(values)
        self.where = where
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether key is present and not null."""
        self._asked.add(key)
        return self.values.get(key) is not None

    def raw(self, key: str) -> Any:
        """The value as it stands, None if absent."""
        self._asked.add(key)
        return self.values.get(key)

    def _typed(self, key: str, kind: str, ok: bool, default: Any) -> Any:
        value = self.raw(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.where}: {key} is missing", hint=AGAIN)
            return default
        if not ok:
            raise CheckpointError(
                f"{self.where}: {key} must be {kind}, but is {value!r:.80}", hint=AGAIN
            )
        return value

    def int(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = (1 << 31) - 1
    ) -> int:
        """A whole number from `least` to `most`."""
        value = self.raw(key)
        ok = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        small = most == (1 << 31) - 1 and not (isinstance(value, int) and value > most)
        limit = f"{least} or more" if small else f"{least} to {most}"
        return self._typed(key, f"a whole number, {limit}", ok, default)

    def float(self, key: str, default: float | None = None, *, least: float = -math.inf) -> float:
        """A finite number from `least` to HUGE."""
        value = self.raw(key)
        ok = isinstance(value, (int, float)) and not isinstance(value, bool)
        small = not (ok and abs(value) > HUGE)
        ok = ok and abs(value) <= HUGE and value >= least
        limit = f", {least:g} or more" if least > -math.inf else ""
        limit = limit if small else f", {max(least, -HUGE):g} to {HUGE:g}"
        return float(self._typed(key, f"a finite number{limit}", ok, default))

    def bool(self, key: str, default: bool) -> bool:
        """true or false."""
        return self._typed(key, "true or false", isinstance(self.raw(key), bool), default)

    def str(self, key: str, default: str | None = None) -> str:
        """A string."""
        return self._typed(key, "a string", isinstance(self.raw(key), str), default)

    def floats(self, key: str, count: int) -> list[float]:
        """A list of `count` numbers."""
        value: Any = self.raw(key)
        ok = isinstance(value, list) and len(cast("list[Any]", value)) == count
        ok = ok and all(isinstance(v, (int, float)) for v in cast("list[Any]", value))
        return [float(v) for v in self._typed(key, f"a list of {count} numbers", ok, None)]

    def ints(self, key: str) -> list[int]:
        """A whole number or a list of them, as a list; absent: empty."""
        value: Any = self.raw(key)
        if value is None:
            return []
        items = cast("list[Any]", value if isinstance(value, list) else [value])
        ok = all(isinstance(v, int) and not isinstance(v, bool) for v in items)
        self._typed(key, "a whole number or a list of them", ok, None)
        return items

    def strings(self, key: str) -> list[str]:
        """A list of strings; absent: empty."""
        value: Any = self.raw(key)
        if value is None:
            return []
        ok = isinstance(value, list) and all(isinstance(v, str) for v in cast("list[Any]", value))
        return self._typed(key, "a list of strings", ok, None)

    def level(self, key: str) -> Config | None:
        """The object under key, None if absent."""
        value: Any = self.raw(key)
        if value is None:
            return None
        self._typed(key, "an object", isinstance(value, dict), None)
        return Config(cast("dict[str, Any]", value), f"{self.where}: {key}")

    def require(self, key: str, *allowed: Any) -> None:
        """Raise unless key is absent or one of the values that the model implements."""
        value = self.raw(key)
        if value is not None and value not in allowed:
            names = " or ".join(repr(a) for a in allowed)
            raise CheckpointError(
                f"{self.where}: {key} is {value!r:.80}, only {names} is supported", hint=UPDATE
            )

    def unread(self) -> list[str]:
        """Keys nobody asked for; null is as good as no key."""
        return sorted(k for k, v in self.values.items() if v is not None and k not in self._asked)
