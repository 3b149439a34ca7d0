"""Changes of attributes by steps and forwards, of a module and of its parts, for the ranks that do not run them.

Hooks, optimizers and schedulers run on every rank, and may read what the step has kept: the loss that decides whether a
gradient is dropped, a factor of the learning rate. So these ranks get its numbers and small tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gpp._compat.lightning_module import LIGHTNING_STATE
from lightning_gpp._compat.torch import pytree, version
from lightning_gpp.capture.attributes import (
    CONTAINERS,
    MOST_NUMBERS,
    OF_EVERY_MODULE,
    SCALARS,
    TOLD,
    Attribute,
    AttributePlace,
    copy_of,
    has_settings,
    is_plain,
    same_contents,
    same_value,
    settings,
)
from lightning_gpp.capture.outside import OUTSIDE
from lightning_gpp.user_code import own_attributes

NOT_USERS: Final = OF_EVERY_MODULE | LIGHTNING_STATE
"""Names of attributes of a LightningModule that are torch's and Lightning's."""

Noted = tuple[Any, Any]
"""A value, and what tells whether it has changed in place: the copy of a container, the version of a tensor."""


class StepAttributes:
    """Notes the values in the attributes of a module, and in objects and dictionaries there, and finds changes.

    Args:
        module: the module whose method is the step.
        own: whether attributes of the module itself are noted, besides those of its parts.
        of_parts: names of the attributes of its parts that are noted.
        outside: attributes outside of the module that are noted (`capture.outside`).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        own: bool = True,
        of_parts: Set[str] = frozenset(),
        outside: Sequence[Attribute] = (),
    ) -> None:
        self._module, self._own, self._outside = module, own, outside
        self._noted: dict[Attribute, Noted] = {}
        self._inside: dict[Attribute, tuple[Any, int, list[Attribute]]] = {}
        self._parts = places_in_parts(module, of_parts) if of_parts else []

    def note(self) -> None:
        """Note the present values."""
        self._noted = {key: (value, _mark(key, value)) for key, value in self._values()}

    def changed(self) -> dict[Attribute, Any]:
        """The values that others may need, of those that have changed since `note`."""
        return _sent({key: value for key, value in self._values() if self._has_changed(key, value)})

    def named(self, names: Set[str]) -> dict[Attribute, Any]:
        """The present values of attributes of these names, and of those inside of attributes of these names."""
        return {key: value for key, value in self._values() if is_named(key, names)}

    def _has_changed(self, key: Attribute, value: Any) -> bool:
        if key not in self._noted:
            return True
        before, mark = self._noted[key]
        if isinstance(value, Tensor):
            return value is not before or version(value) != mark
        if mark is not None:
            return not same_contents(mark, value)
        return value is not before and not same_value(before, value)

    def _values(self) -> Iterator[tuple[Attribute, Any]]:
        if self._own:
            yield from self._own_values()
        for (path, name), own in self._parts:
            yield from self._values_of(path, name, own.get(name))
        for path, name in self._outside:
            yield from self._values_of(path, name, AttributePlace(self._module, (path, name)).read())

    def _own_values(self) -> Iterator[tuple[Attribute, Any]]:
        for name, value in list(vars(self._module).items()):
            if name not in NOT_USERS:
                yield from self._values_of("", name, value)

    def _values_of(self, path: str, name: str, value: Any) -> Iterator[tuple[Attribute, Any]]:
        """The value of an attribute; of an object or dictionary, those inside."""
        known, length, keys = self._inside.get((path, name), (None, 0, []))
        if type(value) in SCALARS or not ((known is value and not isinstance(value, dict)) or has_settings(value)):
            yield (path, name), value
            return
        size = len(value) if isinstance(value, dict) else len(own_attributes(value) or ())
        if known is not value or length != size:  # its places are looked up again
            whole = path.startswith(OUTSIDE) and _is_plain_inside(value)
            inside = {name: value} if whole else settings(name, value)
            keys = [(path, inner) for inner, content in inside.items() if whole or is_plain(content)]
            self._inside[path, name] = value, size, keys
        yield from ((key, AttributePlace(self._module, key).read()) for key in keys)


def is_named(attribute: Attribute, names: Set[str]) -> bool:
    """True if an attribute, or what it is in, has one of the names."""
    return not names.isdisjoint(attribute[1].split("."))


def places(module: nn.Module, names: Set[str]) -> Iterator[tuple[Attribute, dict[str, Any]]]:
    """The attributes of these names of a module and its parts, with the dictionaries that have their values.

    Those of metrics are left out, whose states have ways of their own.
    """
    for path, part in module.named_modules():
        if not isinstance(part, Metric):
            own = vars(part)
            yield from (((path, name), own) for name in sorted(names & own.keys() - NOT_USERS))


def places_in_parts(module: nn.Module, names: Set[str]) -> list[tuple[Attribute, dict[str, Any]]]:
    """Those of its parts alone."""
    return [(key, own) for key, own in places(module, names) if key[0]]


def _mark(key: Attribute, value: Any) -> Any:
    if type(value) in SCALARS:
        return None
    if isinstance(value, Tensor):
        return version(value)
    large = key[0].startswith(OUTSIDE) and isinstance(value, CONTAINERS) and len(value) <= MOST_NUMBERS
    return _copy_inside(value) if large else copy_of(value)


def _copy_inside(value: Any) -> Any:
    """A copy of a container, and of those in it."""
    made = copy.copy(value)
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, CONTAINERS):
                made[key] = _copy_inside(item)
    return made


def _is_plain_inside(value: Any) -> bool:
    """True for containers of containers of numbers and texts, not too many: no hook gets those outside otherwise."""
    if not isinstance(value, CONTAINERS):
        return False
    leaves = pytree.tree_leaves(list(value) if isinstance(value, set | frozenset) else value)
    return len(leaves) <= MOST_NUMBERS and all(isinstance(leaf, SCALARS) for leaf in leaves)


def _may_be_sent(key: Attribute, value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout == torch.strided and not value.is_meta and value.numel() <= MOST_NUMBERS
    if isinstance(value, np.ndarray):
        return value.dtype != object and value.size <= MOST_NUMBERS
    if is_plain(value) or (key[0].startswith(OUTSIDE) and _is_plain_inside(value)):
        return True
    return isinstance(value, TOLD) and "<locals>" not in type(value).__qualname__


def _sent(values: Mapping[Attribute, Any]) -> dict[Attribute, Any]:
    sent = {key: value for key, value in values.items() if _may_be_sent(key, value)}
    return {key: value.detach().cpu() if isinstance(value, Tensor) else value for key, value in sent.items()}


def present(module: nn.Module, keys: Iterable[Attribute]) -> dict[Attribute, Any]:
    """The values of attributes as they are now, those that may be sent."""
    return _sent({key: AttributePlace(module, key).read() for key in keys})


def take_over(module: nn.Module, values: Mapping[Attribute, Any], device: torch.device) -> None:
    """Set attributes to values of the rank that ran the step."""
    for key, value in values.items():
        place = AttributePlace(module, key)
        if place.owner is not None:  # in an object that the step has made
            place.put(value.to(device) if isinstance(value, Tensor) else value)
