"""Conversion between checkpoint folders and ordinary files of Lightning, one tensor at a time."""

from __future__ import annotations

import io
import mmap
import pickle
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.checkpoints.atomic import being_written, present, put, reason, synchronise
from lightning_gpp.checkpoints.file import not_written, reading
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
    checkpoint: dict[str, Any] = _each(opened(path), lambda stored, name: stored[name])
    return checkpoint


def convert(source: str | Path, target: str | Path) -> None:
    """Write a folder's checkpoint as a file, or a file's as a folder, in memory for one tensor.

    Raises:
        CheckpointError: there is no whole checkpoint, or its copy cannot be written.
    """
    checkpoint, target = opened(source), Path(target)
    if is_folder(source):
        _write_file(checkpoint, target)
    else:
        tensors, rest = split(checkpoint)
        write_folder(tensors, dumped(rest), target, None)


def _write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a file with room for the tensors first, then each tensor into it, by a mapping into memory."""
    rooms: dict[int, tuple[StoredValues, str]] = {}
    outline = _each(checkpoint, partial(_room, rooms))
    try:
        with being_written(path) as part:
            with torch.serialization.skip_data():
                torch.save(outline, part)
            with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
                mapped = torch.load(part, mmap=True, weights_only=False)
            for tensor, place in zip(_tensors_in(outline), _tensors_in(mapped), strict=True):
                _write_tensor(tensor, place, rooms.get(id(tensor)))
            del mapped, place
            synchronise(part)
            put(part, path)
    except (OSError, RuntimeError) as error:
        raise not_written(path, reason(error)) from error


def _write_tensor(tensor: Tensor, place: Tensor, source: tuple[StoredValues, str] | None) -> None:
    if source is None:
        place.detach().copy_(tensor.detach())
    else:
        stored, name = source
        stored.fill(name, place)


def _each(tree: Any, value: Callable[[StoredValues, str], Any]) -> Any:
    """The tree with plain dicts for stored values."""
    if isinstance(tree, StoredValues):
        return {name: value(tree, name) for name in tree}
    if isinstance(tree, dict):
        return {name: _each(branch, value) for name, branch in tree.items()}
    return [_each(branch, value) for branch in tree] if type(tree) is list else tree


def _room(rooms: dict[int, tuple[StoredValues, str]], stored: StoredValues, name: str) -> Any:
    """A tensor whose memory nobody touches."""
    outline = stored.outline(name)
    if outline is None:
        return stored[name]
    room = torch.empty_like(outline, device="cpu")
    rooms[id(room)] = stored, name
    return room


def _tensors_in(value: Any) -> list[Tensor]:
    """All tensors of any objects, in the order in which they are pickled."""
    search = _TensorSearch(io.BytesIO(), protocol=2)
    search.dump(value)
    return search.tensors


class _TensorSearch(pickle.Pickler):
    """Pickles objects without their tensors, which it collects."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors)
