"""A checkpoint as one file, as plain Lightning writes it, and the errors of reading and writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_gpp.checkpoints.atomic import being_written, put, reason, synchronise
from lightning_gpp.errors import CheckpointError, GPPError, MissingCheckpointError


def write_file(checkpoint: Any, path: Path) -> None:
    """Save to a file, which is complete as soon as it has its name.

    Raises:
        CheckpointError: the file system is full, or does not allow it. Nothing new stays there.
    """
    try:
        with being_written(path) as part, part.open("xb") as file:
            torch.save(checkpoint, file)
            file.flush()
            synchronise(part)
            put(part, path)
    except (OSError, RuntimeError) as error:
        raise not_written(path, reason(error)) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, a checkpoint's file is read.

    Raises:
        CheckpointError: names the file if it is damaged, or something else.
        MissingCheckpointError: there is no such file.
    """
    try:
        yield
    except (GPPError, MemoryError):
        raise
    except Exception as error:  # unpickling junk raises anything
        if "GLOBAL" in str(error):  # of weights_only: says what may not be loaded, and what to do
            raise
        if isinstance(error, FileNotFoundError):
            raise MissingCheckpointError(
                f"{path} does not exist. Give the path of a checkpoint (ckpt_path)."
            ) from error
        why = "its content is no pickle of tensors" if "weights_only" in str(error) else reason(error).rstrip(".")
        raise CheckpointError(
            f"{path} is not a checkpoint that can be read: {why}. If it was one, it is damaged, or has objects of "
            "classes that are not here. Give another one (ckpt_path)."
        ) from error


def not_written(path: Path, why: str) -> CheckpointError:
    """The error for a checkpoint that cannot be written."""
    return CheckpointError(f"The checkpoint {path} cannot be written: {why}. An older one of this name is as it was.")
