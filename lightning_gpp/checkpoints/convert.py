"""Checkpoints as they lie on the disk: opened, described, and converted between folders and files of Lightning."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_gpp.checkpoints.atomic import present
from lightning_gpp.checkpoints.file import reading, write_file
from lightning_gpp.checkpoints.folder import META, is_folder, write_folder
from lightning_gpp.checkpoints.layout import KEY, dumped, joined, split
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


def contents(path: str | Path) -> dict[str, str]:
    """The contents of a checkpoint, in words.

    Raises:
        CheckpointError: there is no whole checkpoint.
    """
    checkpoint, path = opened(path), present(Path(path))
    entry = checkpoint.get(KEY, {})
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    kind, size = (
        f"folder of {len(files)} files" if path.is_dir() else "file",
        sum(file.stat().st_size for file in files),
    )
    version = checkpoint.get("pytorch-lightning_version", "of unknown version")
    described = {
        "checkpoint": f"{path}, {kind}, {size / 2**20:,.1f} MiB, {len(checkpoint.get('state_dict', ()))} tensors",
        "written by": f"Lightning {version}" + (f", torch {entry['torch']}" if "torch" in entry else ""),
        "progress": f"epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}",
        "weight policy": (entry.get("pipeline") or {}).get("policy", "synchronous") if entry else "",
        "other entries": ", ".join(sorted(checkpoint.keys() - {"state_dict", KEY})),
        "plan": "\n" + entry["plan"] if entry.get("plan") else "",
    }
    return {name: text for name, text in described.items() if text}
