"""Mirrors on all ranks of a pipeline what steps and forwards change in attributes of the module.

A training step runs on one rank, forwards run where their stages are, and hooks run everywhere. So what a step has
changed reaches the other ranks as one difference: numbers, texts and small containers of them with its logs, and all
else (lists of results, tensors, what forwards and evaluation have changed) before the hooks at the end of an epoch.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, is_dataclass
from operator import is_
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_gpp._compat.lightning_module import LIGHTNING_STATE
from lightning_gpp._compat.torch import buffers_of, pytree, version
from lightning_gpp.capture.attributes import (
    MOST_ITEMS,
    MOST_NUMBERS,
    OF_EVERY_MODULE,
    SCALARS,
    TOLD,
    Attribute,
    copy_of,
    dotted,
    is_plain,
    same_contents,
    same_value,
)
from lightning_gpp.training.control import Control

NOT_USERS: Final = OF_EVERY_MODULE | LIGHTNING_STATE
"""Names of attributes of a LightningModule that are torch's and Lightning's."""
MOST_BYTES: Final = 64 << 20
"""Bytes of tensors and arrays that a rank sends at the end of an epoch, at most."""
_CONTAINERS: Final = (list, tuple, dict, set, deque)
_DEEPEST: Final = 3
_NOTHING: Final = object()

Attributes = dict[str, Any]
"""The dictionary that has the attributes of a part of the module."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """Items that a step has appended to a long list, which had `start` items before."""

    start: int
    items: list[Any]


class MirroredState:
    """Notes what changes in attributes around each step, and gives it to the other ranks of the pipeline.

    Args:
        module: the user's module, with whose parts, except metrics and layers of torch, the attributes are.
        control: the side channel of this rank.
        device: the device of this rank.

    Attributes:
        latest: the attributes that the last step has changed.
    """

    def __init__(self, module: nn.Module, control: Control, device: torch.device) -> None:
        self._module, self._control, self._device = module, control, device
        self._changed: set[Attribute] = set()
        self.latest: list[Attribute] = []
        self._parts: list[tuple[str, Attributes]] = []
        self._values: list[Attributes] = []
        self._marks: dict[Attribute, tuple[Any, Any]] = {}
        self._versions: dict[str, tuple[int, int]] = {}

    def begin(self) -> None:
        """Note the present values, before a step. All ranks call this."""
        if not self._parts:
            self._parts = [(path, vars(part)) for path, part in self._module.named_modules() if _may_keep(part)]
        self._values = [dict(own) for _, own in self._parts]
        self._versions = self._buffers()
        found = ((path, name, value) for path, own in self._parts for name, value in _changing(own))
        self._marks = {(path, name): (value, _mark(value)) for path, name, value in found if _is_shared(path, name)}

    def changed_buffers(self) -> set[Attribute]:
        """The buffers of the LightningModule itself that have changed since `begin`."""
        return {("", name) for name, version in self._buffers().items() if self._versions.get(name) != version}

    def _buffers(self) -> dict[str, tuple[int, int]]:
        own = buffers_of(self._module)
        return {name: (id(buffer), version(buffer)) for name, buffer in own.items() if buffer is not None}

    def end(self) -> dict[Attribute, Any]:
        """Note what has changed since `begin`. Returns the plain values among it."""
        self.latest = list(self._changes())
        self._changed.update(self.latest)
        values = ((key, self._difference(key)) for key in self.latest)
        return {key: value for key, value in values if _is_told(value.items if isinstance(value, _Tail) else value)}

    def _difference(self, key: Attribute) -> Any:
        """The value of an attribute, or what was appended to a list that is too long to be sent after each step."""
        value, (before, mark) = self._owner(key)[key[1]], self._marks.get(key, (None, None))
        if value is before and isinstance(value, list) and len(value) > max(MOST_ITEMS, mark[0]):
            return _Tail(mark[0], value[mark[0] :])
        return value

    def _changes(self) -> Iterator[Attribute]:
        for (path, own), before in zip(self._parts, self._values, strict=True):
            if len(before) != len(own) or not all(map(is_, before.values(), own.values())):
                others = (name for name, value in own.items() if _is_other(name, value, before))
                yield from ((path, name) for name in others if _is_shared(path, name))
        for key, (value, mark) in self._marks.items():
            if self._owner(key).get(key[1]) is value and not _is_same(mark, value):
                yield key

    def take(self, values: Mapping[Attribute, Any]) -> None:
        """Set attributes to the values of another rank; a container keeps its identity, because others may have it."""
        for key, value in values.items():
            own, name = self._owner(key), key[1]
            _put(own, name, pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device), value))

    def end_epoch(self) -> None:
        """Give all ranks the present values of what has changed. All ranks of the pipeline call this together.

        The present ones, because hooks may have set others since, on all ranks. Where two ranks have changed an
        attribute, that of the step's rank counts.
        """
        mine, self._changed = self._sendable(sorted(self._changed)), set()
        gathered: list[dict[Attribute, Any]] = self._control.gather_in_pipeline(mine)
        own = mine.keys() if self._control.runs_step else set[Attribute]()
        for values in [*gathered[1:], gathered[0]]:
            self.take({key: value for key, value in values.items() if key not in own})
        self._parts = []  # hooks may make others

    def _sendable(self, keys: Iterable[Attribute]) -> dict[Attribute, Any]:
        values = {key: self._owner(key).get(key[1]) for key in keys}
        found = {key: value for key, value in values.items() if _is_data(value)}
        if (size := sum(map(_bytes, pytree.tree_leaves(list(found.values()))))) > MOST_BYTES:
            self._control.warn(
                f"Steps have kept {size >> 20} MiB in {', '.join(map(dotted, found))}. More than {MOST_BYTES >> 20} "
                "MiB are not sent to other ranks, on which hooks at the end of the epoch find what was there before: "
                "keep what hooks need as a torchmetrics object, or log it."
            )
            found = {key: value for key, value in found.items() if _is_told(value)}
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), found)  # type: ignore[no-any-return]

    def _owner(self, key: Attribute) -> Attributes:
        return vars(self._module.get_submodule(key[0]))


def _put(own: Attributes, name: str, value: Any) -> None:
    now: Any = own.get(name)
    if isinstance(value, _Tail):
        now[value.start :] = value.items
    elif type(now) is type(value) and isinstance(now, list):
        now[:] = value
    elif type(now) is type(value) and isinstance(now, dict | set):
        now.clear()
        now.update(value)
    else:
        own[name] = value


def _may_keep(part: nn.Module) -> bool:
    """False for metrics, whose states have a way of their own, and for layers of torch, which keep nothing."""
    return not isinstance(part, Metric | MetricCollection) and not type(part).__module__.startswith("torch.")


def _is_shared(path: str, name: str) -> bool:
    """False for private names of parts: what a part has done where it computes, such as installing hooks on layers."""
    return not (path and name.startswith("_"))


def _is_other(name: str, value: Any, before: Attributes) -> bool:
    if name in NOT_USERS or before.get(name, _NOTHING) is value:
        return False
    return not (isinstance(value, SCALARS) and same_value(before.get(name, _NOTHING), value))


def _changing(own: Attributes) -> Iterator[tuple[str, Any]]:
    """The attributes whose values may change in place."""
    for name, value in own.items():
        if isinstance(value, (*_CONTAINERS, Tensor, np.ndarray)) and name not in NOT_USERS:
            yield name, value


def _mark(value: Any, depth: int = 0) -> Any:
    """The version, copy, or length and marks of what is inside, which tell whether a value has changed in place."""
    if isinstance(value, Tensor):
        return version(value)
    if isinstance(value, np.ndarray):
        return copy_of(value)
    if len(value) > MOST_ITEMS:
        return len(value), None, []
    copied = None if isinstance(value, tuple) else copy(value)
    return len(value), copied, [_mark(each, depth + 1) for each in _inside(value, depth)]


def _inside(container: Any, depth: int) -> list[Any]:
    """The containers in a container."""
    items = container.values() if isinstance(container, dict) else container
    return [each for each in items if isinstance(each, _CONTAINERS)] if depth < _DEEPEST else []


def _is_same(mark: Any, now: Any, depth: int = 0) -> bool:
    if isinstance(now, Tensor):
        return bool(mark == version(now))
    if isinstance(now, np.ndarray):
        return mark is None or same_contents(mark, now)
    length, copied, marks = mark
    if length != len(now) or not (copied is None or _are_kept(copied, now) or same_contents(copied, now)):
        return False
    return all(_is_same(each, other, depth + 1) for each, other in zip(marks, _inside(now, depth), strict=False))


def _are_kept(copied: Any, now: Any) -> bool:
    """True if a container has the very items of its copy: in most steps nothing changes, and nothing is compared."""
    if isinstance(copied, dict) and not all(map(is_, copied.values(), now.values())):
        return False
    return all(map(is_, copied, now))


def _is_told(value: Any) -> bool:
    """True for what is sent after each step: numbers, texts, and small tensors and containers."""
    if isinstance(value, Tensor):
        return not value.is_meta and value.layout == torch.strided and value.numel() <= MOST_NUMBERS
    return is_plain(value) or (isinstance(value, TOLD) and _is_found_elsewhere(value))


def _is_data(value: Any) -> bool:
    """True for what is sent at the end of an epoch: data, and dataclasses of the user's."""
    leaves = pytree.tree_leaves(list(value) if isinstance(value, set | frozenset) else value)
    are_data = all(isinstance(leaf, (*TOLD, np.ndarray)) or is_dataclass(leaf) or _is_here(leaf) for leaf in leaves)
    return are_data and _is_found_elsewhere(value)


def _is_here(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and not leaf.is_meta


def _is_found_elsewhere(value: Any) -> bool:
    """False for instances of classes that other processes cannot find."""
    try:
        return bool(pickle.dumps(pytree.tree_map_only(Tensor | np.ndarray, lambda _: 0, value)))
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def _bytes(leaf: Any) -> int:
    return leaf.nbytes if isinstance(leaf, Tensor | np.ndarray) else 0
