"""Checkpoint files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_gpp.errors import CheckpointError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a file beside its target and renames it; URLs are left to Lightning.

    Lightning makes the file in memory, writes it to the temporary folder, which may be another file system, and moves
    it: a kill during the move leaves part of a file under the target's name.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint.

        Raises:
            CheckpointError: it cannot be written; an older file of this name is as it was.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            write_whole(checkpoint, Path(path))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"The checkpoint {path} cannot be written: {_reason(error)}. An older file of this name is as it was."
            ) from error


def write_whole(checkpoint: Any, path: Path) -> None:
    """Save to a file, which is complete as soon as it has its name.

    Raises:
        OSError, RuntimeError: the file system is full, or does not allow it. Nothing new stays there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _synchronise(path.parent)


def _synchronise(folder: Path) -> None:
    """Write a folder's entries to the disk: a rename is there after a crash only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """The operating system's words, if they are known: torch reports that its file could not be written."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0]
