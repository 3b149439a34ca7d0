"""Files and folders that are there as a whole or not at all.

    .saving/NAME             being written, and locked meanwhile; or left by a process that was killed
    NAME                     whole
    .saving/NAME.previous    whole, between two renames, where the file system cannot exchange two folders

In a folder of their own they are not found by code that looks for a part of a name, as Lightning does for `last` and
`hpc_ckpt_`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_HERE: Final = -100  # AT_FDCWD: paths are as in all other calls
_EXCHANGE: Final = 2  # RENAME_EXCHANGE


def part_of(path: Path) -> Path:
    """The path at which a file or folder is written."""
    return _saving(path.parent) / path.name


def present(path: Path) -> Path:
    """The path, or the previous folder of this name if a process was killed while it replaced it."""
    previous = _previous_of(path)
    return previous if not path.exists() and previous.exists() else path


@contextmanager
def being_written(path: Path) -> Iterator[Path]:
    """Inside, a file or folder is written at `part_of(path)`; after an error nothing of it stays there."""
    part = part_of(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    clean(path.parent)
    discard(part)
    try:
        yield part
    except BaseException:
        with suppress(OSError):
            discard(part)
        raise
    finally:
        _tidy(path.parent)


def put(part: Path, path: Path) -> None:
    """Give a file or folder its name, in place of any older one.

    There is no moment without one of them. Only where a file system cannot exchange two names, a folder has the name of
    `present` for a moment.
    """
    if not _replaced(part, path):
        discard(_previous_of(path))
        path.rename(_previous_of(path))
        part.rename(path)
    synchronise(path.parent)
    for older in (part, _previous_of(path)):
        discard(older)


def _replaced(part: Path, path: Path) -> bool:
    """True if one call of the operating system was enough."""
    folders = part.is_dir() or (path.is_dir() and not path.is_symlink())
    if not folders or not os.path.lexists(path):
        part.replace(path)
        return True
    return exchange(part, path)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step. Returns False where the system cannot do that."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


def remove(path: Path) -> None:
    """Remove a file or folder, which no longer has its name as soon as parts of it are missing."""
    if os.path.lexists(path):
        with being_written(path) as part:
            path.rename(part)
            discard(part)


def discard(path: Path) -> None:
    """Remove a file, a link or a folder without a name of its own, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clean(folder: Path) -> None:
    """Remove what killed processes have left in a folder; what a living one writes is locked."""
    for part in _saving(folder).glob("*"):
        needed = part.suffix == ".previous" and not (folder / part.stem).exists()
        with suppress(FileNotFoundError), locked(part) as mine:
            if mine and not needed:
                discard(part)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a file or folder, until the end of the context or of this process.

    Inside, the value is False if another process has locked it, or if the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def synchronise(path: Path) -> None:
    """Write a file, or a folder's entries, to the disk: a rename is there after a crash only then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: BaseException) -> str:
    """The operating system's words, if they are known: torch reports that its file could not be written."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _saving(folder: Path) -> Path:
    return folder / ".saving"


def _previous_of(path: Path) -> Path:
    return _saving(path.parent) / f"{path.name}.previous"


def _tidy(folder: Path) -> None:
    """Remove the folder for writing, if nothing is in it."""
    with suppress(OSError):
        _saving(folder).rmdir()
