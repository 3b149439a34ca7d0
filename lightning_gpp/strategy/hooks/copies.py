"""Copies of weights that users keep during a run (the best ones, averages): whole on global rank 0 after it.

A hook that copies the state dict runs on every rank, and gives each the values of its stages; the others are foreign.
All ranks keep such copies at the same places, so that global rank 0 can get what it lacks from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_gpp._compat.torch import buffers_of, parameters_of
from lightning_gpp.capture.attributes import FRAMEWORKS
from lightning_gpp.training.checkpoint import merge
from lightning_gpp.training.control import Control
from lightning_gpp.training.foreign import Foreign
from lightning_gpp.training.mirrored_state import NOT_USERS
from lightning_gpp.user_code import own_attributes

_DEPTH: Final = 5


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    """A tensor that is kept somewhere, and what puts another one into its place."""

    value: Tensor
    put: Callable[[Any], object]

    def complete(self, values: Tensor) -> None:
        if values.shape == self.value.shape:
            whole: Tensor = values.to(self.value.dtype)
            is_parameter = isinstance(self.value, nn.Parameter)
            self.put(nn.Parameter(whole, self.value.requires_grad) if is_parameter else whole)


def complete_copies(module: pl.LightningModule, callbacks: Iterable[object], control: Control) -> None:
    """Give global rank 0 the values of the copies that callbacks and module keep, on the CPU. All ranks call this."""
    kept = dict(_CopySearch(module).over([module, *callbacks]))
    lacking = {path: each.value for path, each in kept.items() if isinstance(each.value, Foreign)}
    wanted = control.broadcast({path: min(value.ranks, default=-1) for path, value in lacking.items()})
    if not wanted:
        return
    mine = {
        path: kept[path].value for path, rank in wanted.items() if rank == control.mesh.own_process and path in kept
    }
    received = merge({path: value for path, value in mine.items() if not value.is_meta}, control)
    for path, values in received.items() if control.first else ():
        kept[path].complete(values)


class _CopySearch:
    """Finds the tensors in attributes of objects, and in containers, modules and users' objects there.

    `module`: is divided, and made whole by the engine; its parts and parameters do not count.
    """

    def __init__(self, module: nn.Module) -> None:
        self._seen = {id(part) for part in module.modules()}

    def over(self, owners: Iterable[object]) -> Iterator[tuple[str, _KeptTensor]]:
        """The tensors by paths, which are the same on all ranks."""
        for number, owner in enumerate(owners):
            yield from self._in_attributes(owner, f"{number}", _DEPTH)

    def _in_attributes(self, owner: object, path: str, depth: int) -> Iterator[tuple[str, _KeptTensor]]:
        attributes = vars(owner)
        for name in list(attributes):
            if name not in NOT_USERS:
                yield from self._inside(attributes, name, f"{path}.{name}", depth)

    def _inside(self, container: Any, key: Any, path: str, depth: int) -> Iterator[tuple[str, _KeptTensor]]:
        value = container[key]
        if isinstance(value, Tensor):
            yield path, _KeptTensor(value, lambda whole: container.__setitem__(key, whole))
        elif depth and id(value) not in self._seen:
            yield from self._of(value, path, depth - 1)

    def _of(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, _KeptTensor]]:
        if isinstance(value, dict | list | tuple):
            self._seen.add(id(value))
            for key in list(value) if isinstance(value, dict) else range(len(value)):
                yield from self._inside(value, key, f"{path}[{key!r}]", depth)
        elif isinstance(value, nn.Module):
            self._seen.add(id(value))
            for name, part in value.named_modules():
                for tensors in (parameters_of(part), buffers_of(part)):
                    for key in tensors:
                        yield from self._inside(tensors, key, f"{path}.{name}.{key}", 0)
        elif _is_users(value):
            self._seen.add(id(value))
            yield from self._in_attributes(value, path, depth)


def _is_users(value: object) -> bool:
    """True for an object with attributes, of a class that belongs to no framework."""
    users = type(value).__module__.split(".")[0] not in FRAMEWORKS and not callable(value)
    return users and own_attributes(value) is not None
