"""Files and folders that are there as a whole or not at all.

    .saving/NAME             being written, or left by a process that was killed
    NAME                     whole
    .saving/NAME.previous    whole, between two renames: no call replaces a folder

In a folder of their own they are not found by code that looks for a part of a name, as Lightning does for `last` and
`hpc_ckpt_`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def part_of(path: Path) -> Path:
    """The path at which a file or folder is written."""
    return path.parent / ".saving" / path.name


def present(path: Path) -> Path:
    """The path, or the previous folder of this name if a process was killed while it replaced it."""
    previous = _previous_of(path)
    return previous if not path.exists() and previous.exists() else path


@contextmanager
def being_written(path: Path) -> Iterator[Path]:
    """Inside, a file or folder is written at `part_of(path)`; after an error nothing of it stays there."""
    part = part_of(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    discard(part)
    try:
        yield part
    except BaseException:
        with suppress(OSError):
            discard(part)
        raise
    finally:
        with suppress(OSError):  # something is in it
            part.parent.rmdir()


def put(part: Path, path: Path) -> None:
    """Give a file or folder its name, in place of any older one, which until then has its name or that of `present`."""
    previous = _previous_of(path)
    if path.is_dir() or (part.is_dir() and os.path.lexists(path)):
        discard(previous)
        path.rename(previous)
    part.replace(path)
    synchronise(path.parent)
    discard(previous)


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


def _previous_of(path: Path) -> Path:
    return path.parent / ".saving" / f"{path.name}.previous"
