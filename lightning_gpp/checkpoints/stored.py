"""Values in a checkpoint folder, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_gpp.checkpoints.atomic import present
from lightning_gpp.checkpoints.file import reading
from lightning_gpp.checkpoints.folder import METADATA, is_folder
from lightning_gpp.errors import CheckpointError

KeyTree = str | Mapping[str | int, Any]
"""The key of a value in a folder, or a tree of keys."""


class Folder:
    """Reads values from a checkpoint folder, each as a whole or only a rank's shard.

    Args:
        path: the folder.

    Attributes:
        metadata: the sizes and places of all values.

    Raises:
        CheckpointError: the path is not a whole checkpoint folder, or it is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        if not is_folder(path):
            raise CheckpointError(
                f"{path} is not a whole checkpoint: a folder needs the files .metadata and meta.pt. Give a file, or a "
                "folder that was written to its end."
            )
        self.path = present(Path(path))
        self._reader = FileSystemReader(self.path)
        with reading(self.path / METADATA):
            self.metadata: Metadata = self._reader.read_metadata()
        for part in self._parts():
            if not (self.path / part).is_file():
                raise CheckpointError(
                    f"{self.path} is not a whole checkpoint: its file {part} is missing. Copy it, too."
                )

    @property
    def tree(self) -> dict[str | int, Any]:
        """The tree that was written, with keys for values; lists are mappings from numbers."""
        tree: dict[str | int, Any] = {}
        for key, (*outer, last) in self.metadata.planner_data.items():
            branch = tree
            for step in outer:
                branch = branch.setdefault(step, {})
            branch[last] = key
        return tree

    def outline(self, key: KeyTree) -> Tensor | None:
        """A tensor of the same shape without memory; None for a value that is not a tensor."""
        facts = self.metadata.state_dict_metadata[key] if isinstance(key, str) else None
        if not isinstance(facts, TensorStorageMetadata):
            return None
        return torch.empty(facts.size, dtype=facts.properties.dtype, device="meta")

    def value(self, tree: KeyTree) -> Any:
        """All of a value, or of a tree of values, on the CPU."""
        if isinstance(tree, str):
            return self._value(tree)
        values = {step: self.value(branch) for step, branch in tree.items()}
        return [values[number] for number in sorted(values)] if set(values) == set(range(len(values))) else values

    def _value(self, key: str) -> Any:
        outline = self.outline(key)
        into = {key: None if outline is None else torch.empty_like(outline, device="cpu")}
        self._read(into)
        return into[key]

    def fill(self, key: KeyTree, tensor: Tensor) -> None:
        """Read a value into a tensor of the same shape; of a DTensor, only this rank's shard."""
        self._read({str(key): tensor.detach()})

    def _read(self, into: dict[str, Any]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(into, self.metadata, is_coordinator=True)
        with reading(self.path / " or ".join(self._parts(*into))):
            self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner).wait()

    def _parts(self, *keys: str) -> list[str]:
        """The files that have these values, by default all."""
        places = self.metadata.storage_data or {}
        return sorted({place.relative_path for index, place in places.items() if not keys or index.fqn in keys})


class StoredValues(MutableMapping[str, Any]):
    """Values of a folder by name. Those that are set here replace those of the folder.

    Args:
        folder: has the values.
        keys: keys of the values in the folder, or trees of them, by name.
    """

    def __init__(self, folder: Folder, keys: Mapping[str, KeyTree]) -> None:
        self._folder, self._keys = folder, dict(keys)
        self._own: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self._own[name] if name in self._own else self._folder.value(self._keys[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self._keys.setdefault(name, "")
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        del self._keys[name]
        self._own.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def outline(self, name: str) -> Tensor | None:
        """A tensor of the same shape without memory; None for a value that is not a tensor."""
        if name not in self._own:
            return self._folder.outline(self._keys[name])
        value = self._own[name]
        return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else None

    def fill(self, name: str, tensor: Tensor) -> None:
        """Read a value into a tensor of the same shape; of a DTensor, only this rank's shard."""
        if name in self._own:
            with torch.no_grad():
                tensor.copy_(self._own[name])
        else:
            self._folder.fill(self._keys[name], tensor)
