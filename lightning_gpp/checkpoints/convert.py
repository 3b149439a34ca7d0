"""Conversion between checkpoint folders and ordinary files of Lightning."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_gpp.checkpoints.atomic import present
from lightning_gpp.checkpoints.file import reading, write_file
from lightning_gpp.checkpoints.folder import META, is_folder, write_folder
from lightning_gpp.checkpoints.layout import dumped, joined, split
from lightning_gpp.checkpoints.stored import Folder, StoredValues


def opened(path: str | Path) -> dict[str, Any]:
    """An ordinary checkpoint from a file or a folder, whose tensors are read when they are used.

    Raises:
        CheckpointError: there is no whole checkpoint.
    """
    path = present(Path(path))
    if path.is_dir():
        folder = Folder(path)
        with reading(path / META):
            return joined(folder, torch.load(path / META, map_location="cpu", weights_only=False))
    with reading(path):
        mapped = zipfile.is_zipfile(path)  # torch maps no files in its older format
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=mapped, weights_only=False)
    return checkpoint


def ordinary(path: str | Path) -> dict[str, Any]:
    """All of a checkpoint, in memory."""
    checkpoint: dict[str, Any] = _in_memory(opened(path))
    return checkpoint


def convert(source: str | Path, target: str | Path) -> None:
    """Write a folder's checkpoint as a file, which needs memory for all of it, or a file's as a folder.

    Raises:
        CheckpointError: there is no whole checkpoint, or its copy cannot be written.
    """
    target = Path(target)
    if is_folder(source):
        write_file(ordinary(source), target)
    else:
        tensors, rest = split(opened(source))
        write_folder(tensors, dumped(rest), target, None)


def _in_memory(tree: Any) -> Any:
    """The tree with plain dicts for stored values."""
    if isinstance(tree, StoredValues | dict):
        return {name: _in_memory(branch) for name, branch in tree.items()}
    return [_in_memory(branch) for branch in tree] if type(tree) is list else tree
