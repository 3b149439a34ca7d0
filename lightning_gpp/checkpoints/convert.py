"""Checkpoints as they lie on the disk: opened, described, and converted between folders and files of Lightning."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    pipeline = entry.get("pipeline") or {}
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    kind = f"folder of {len(files)} files" if path.is_dir() else "file"
    version = checkpoint.get("pytorch-lightning_version", "of unknown version")
    described = {
        "checkpoint": f"{path}, {kind}, {_size(sum(file.stat().st_size for file in files))}",
        "written by": f"Lightning {version}" + (f", torch {entry['torch']}" if "torch" in entry else ""),
        "progress": f"epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}",
        "parameters and buffers": _tensors(checkpoint.get("state_dict", {})),
        **{
            f"optimizer {number}": _tensors(state["state"])
            for number, state in enumerate(checkpoint.get("optimizer_states", []))
        },
        "weights of work in flight": _tensors(pipeline.get("values", {})) if pipeline else "",
        "weight policy": pipeline.get("policy", "synchronous") if entry else "",
        "other entries": ", ".join(sorted(checkpoint.keys() - {"state_dict", "optimizer_states", KEY})),
        "plan": "\n" + entry["plan"] if entry.get("plan") else "",
    }
    return {name: text for name, text in described.items() if text}


def _tensors(tree: Any) -> str:
    outlines = list(_outlines(tree))
    types = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in outlines}))
    return f"{len(outlines)} tensors, {_size(sum(tensor.nbytes for tensor in outlines))} ({types or 'none'})"


def _outlines(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, StoredValues):
        yield from (outline for name in tree if (outline := tree.outline(name)) is not None)
    elif isinstance(tree, Mapping):
        for branch in tree.values():
            yield from _outlines(branch)
    elif isinstance(tree, Tensor):
        yield tree


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
