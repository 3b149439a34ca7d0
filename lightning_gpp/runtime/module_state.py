"""Module state: values in modules that a forward reads and may change, kept so that it can run again with the same
ones.

The second run works on copies: buffers that autograd saved, or that later micro-batches changed, are not written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from lightning_gpp._compat.torch import buffers_of, version

SMALL: Final = 1 << 16
"""Tensors of at most this many elements are assumed to change in every forward: batch norm changes its running
statistics, a few numbers per channel, without raising their version counters. For larger ones the counter is trusted.
"""

_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})

Namespace = dict[str, Any]
"""The attributes of a module, or its buffers."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor of a module, its version, and a copy of it; a large copy is shared until the tensor changes."""

    tensor: Tensor
    version: int
    copy: Tensor

    def is_still(self, tensor: Any) -> bool:
        return tensor is self.tensor and version(self.tensor) == self.version

    @property
    def is_small(self) -> bool:
        return self.tensor.numel() <= SMALL


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that a forward read: numbers, strings and None by namespace, and tensors."""

    plain: list[tuple[Namespace, dict[str, Any]]]
    tensors: list[tuple[Namespace, str, Copied]]


class ModuleState:
    """Buffers of modules, and their attributes that are tensors without a gradient, numbers, strings or None.

    Args:
        modules: the modules, each without its submodules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._namespaces: list[Namespace] = [
            space for module in modules for space in (vars(module), buffers_of(module))
        ]
        self._copied: dict[int, Copied] = {}

    def snapshot(self) -> Snapshot:
        """The state before a forward. A large tensor is copied once, and again only after it changed."""
        copied: dict[int, Copied] = {}
        tensors = [(space, name, self._copy(tensor, copied)) for space, name, tensor in self._tensors()]
        self._copied = copied
        spaces = self._namespaces
        plain = [(space, {name: value for name, value in space.items() if type(value) in _PLAIN}) for space in spaces]
        return Snapshot(plain, tensors)

    @contextmanager
    def restored(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside, modules have the state of the snapshot, afterwards the previous one; lists are shortened."""
        before = [(space, dict(space)) for space in self._namespaces]
        lists = [(value, len(value)) for _, values in before for value in values.values() if type(value) is list]
        _restore(snapshot)
        try:
            yield
        finally:
            for space, values in before:
                for name in space.keys() - values.keys():
                    del space[name]
                space.update(values)
            for items, length in lists:
                del items[length:]

    def _tensors(self) -> Iterator[tuple[Namespace, str, Tensor]]:
        for space in self._namespaces:
            for name, value in space.items():
                if isinstance(value, Tensor) and not value.requires_grad:
                    yield space, name, value

    def _copy(self, tensor: Tensor, copied: dict[int, Copied]) -> Copied:
        key = id(tensor)
        if key not in copied:
            known = self._copied.get(key)
            if known is None or known.is_small or not known.is_still(tensor):
                known = Copied(tensor, version(tensor), tensor.clone())
            copied[key] = known
        return copied[key]  # the same for all names of a tied tensor


def _restore(snapshot: Snapshot) -> None:
    for space, values in snapshot.plain:
        space.update(values)
    copies: dict[int, Tensor] = {}
    for space, name, one in snapshot.tensors:
        if one.is_small or not one.is_still(space.get(name)):
            key = id(one)
            if key not in copies:
                copies[key] = one.copy if one.is_small else one.copy.clone()
            space[name] = copies[key]
