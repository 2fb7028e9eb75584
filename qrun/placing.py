"""A folder that appears whole or not at all, whatever ends the process that makes it.

It is made in a hidden folder beside its place, as `new`; what is replaced waits there as `old`. A
lock file says that it is ours, and its lock that somebody is at work: what a killed process left is
known by the lock's absence, and cleared by the next one that has the same target.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from qrun.errors import QrunError, UsageError

LOCK = "qrun-convert.lock"
# What --force may delete: what a model folder is made of.
_OURS = re.compile(
    r"(generation_|tokenizer_|special_tokens_|preprocessor_)?config\.json|special_tokens_map\.json"
    r"|added_tokens\.json|(tokenizer|vocab)\.json|chat_template\.(json|jinja)|merges\.txt"
    r"|[^/]*\.safetensors(\.index\.json)?|tokenizer\.model"
)


def check_target(src: Path, dst: Path, force: bool) -> None:
    """Raise unless `dst` may come to be: writable, and nothing there, or `force` and a model."""
    inside = Path(os.path.realpath(src))
    if dst == inside or dst in inside.parents:
        raise UsageError(f"{dst}: the target holds the source")
    above = next(path for path in dst.parents if path.exists())
    if not above.is_dir():
        raise QrunError(f"{dst}: cannot be written: {above} is a file, not a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise QrunError(f"{dst}: cannot be written: {above} takes no new files")
    if not os.path.lexists(dst):
        return
    if not force:
        raise UsageError(f"{dst}: exists already", hint="give another name, or --force")
    if not dst.is_dir() or (any(dst.iterdir()) and not (dst / "config.json").is_file()):
        raise UsageError(f"{dst}: not a model's folder, so --force does not replace it")
    for path in sorted(dst.iterdir()):
        if path.is_dir() or not _OURS.fullmatch(path.name):
            raise UsageError(
                f"{dst}: {path.name} is no part of a model, so --force does not replace the folder"
            )


@contextmanager
def new_folder(src: Path, dst: Path, force: bool) -> Generator[Path]:
    """A folder that becomes `dst` if the block ends well, and goes if not."""
    work = lock = None
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{dst.name}.", dir=dst.parent))
        lock = os.open(work / LOCK, os.O_CREAT | os.O_RDWR)
        _try_lock(lock)
        folder = work / "new"
        folder.mkdir()
        yield folder
        _sync_folder(folder)
        check_target(src, dst, force)  # once more: another conversion may have ended meanwhile
        _put_in_place(folder, work / "old", dst)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise QrunError(
            f"{dst}: cannot be written: {error.strerror or error}",
            hint="free some space, or choose another disk" if full else None,
        ) from None
    finally:
        if work is not None:
            _clear(work, dst)
        if lock is not None:
            os.close(lock)


def clear_leftovers(dst: Path) -> None:
    """Remove what killed processes left beside `dst`, and put back what they had set aside."""
    for work in sorted(dst.parent.glob(f".{glob.escape(dst.name)}.????????")):
        try:
            lock = os.open(work / LOCK, os.O_RDWR)
        except OSError:
            continue  # not ours, or just begun
        try:
            if not _try_lock(lock):
                continue  # somebody is at work
            if _clear(work, dst):
                warnings.warn(f"{dst} is back: it was set aside when qrun was killed", stacklevel=3)
        finally:
            os.close(lock)


def _clear(work: Path, dst: Path) -> bool:
    """Remove the work folder -> whether what it had set aside went back to an empty place."""
    back = (work / "old").exists() and not os.path.lexists(dst)
    if back:
        os.rename(work / "old", dst)
    shutil.rmtree(work, ignore_errors=True)
    return back


def _try_lock(handle: int) -> bool:
    """Whether the lock is now ours. On a file system without locks it never is."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _put_in_place(folder: Path, old: Path, dst: Path) -> None:
    """Rename the complete folder to `dst`; what was there waits as `old`, for `_clear`."""
    if os.path.lexists(dst):
        os.rename(dst, old)
    os.rename(folder, dst)
    _sync_folder(dst.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
