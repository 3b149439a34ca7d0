"""Attributes of modules that forwards read: numbers, flags, texts, functions, and tensors that are no parameters.

Those inside of objects that modules keep, such as configurations, have the path to them as their name:
`config.temperature` is in the object that the module has as `config`.
"""

from __future__ import annotations

import argparse
import copy
import enum
import functools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import CHILDREN
from lightning_gpp.user_code import own_attributes

Attribute = tuple[str, str]
"""The path of a module, and the name of its attribute."""

OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))
"""Names of attributes that every module has: parameters, hooks and the like."""
MOST_ITEMS: Final = 64
"""Items of a container whose values are noted."""
MOST_NUMBERS: Final = 1 << 14
"""Numbers of an array that are compared."""
SCALARS: Final = (bool, int, float, complex, str, type(None))
"""Types of numbers, flags and texts."""
TOLD: Final = (*SCALARS, bytes, range, slice, enum.Enum, np.generic, torch.dtype, torch.device, torch.Size)
"""Types of values that `repr` tells apart."""
_CHANGING: Final = (list, dict, set, deque)
CONTAINERS: Final = (*_CHANGING, tuple, frozenset)
_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_NO_SETTINGS: Final = (Tensor, nn.Module, type, types.ModuleType, *_FUNCTIONS)
FRAMEWORKS: Final = ("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_gpp")
"""Packages whose objects run the training, and are no settings of the user's."""
LIBRARIES: Final = {*FRAMEWORKS, "numpy", *sys.stdlib_module_names}
_INSTALLED: Final = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
NAMESPACES: Final = (types.SimpleNamespace, argparse.Namespace)
_OMEGACONF: Final = ("_content", "_val")
"""Attributes of OmegaConf's nodes that have their values; the others change when they are read."""
_BETWEEN: Final = (*_OMEGACONF, CHILDREN)
"""Parts of names that people do not write."""
_MOST_SETTINGS: Final = 512
"""Values of an object; larger ones are data, and not compared."""
_DEEPEST: Final = 6


def is_users(name: str) -> bool:
    """True for the name of a Python module that is neither one of these libraries' nor installed."""
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.partition(".")[0] not in LIBRARIES and not path.startswith(_INSTALLED)


def is_plain(value: Any) -> bool:
    """True for values that can be compared: numbers, texts, None, tensors, and containers of a few of the former."""
    if not isinstance(value, CONTAINERS):
        return isinstance(value, (*SCALARS, Tensor))
    if len(value) > MOST_ITEMS:
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(isinstance(item, SCALARS) for item in items)


def copy_of(value: Any) -> Any:
    """A copy of a container or array that may change without being replaced; None for other and for large values."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= MOST_NUMBERS else None
    return copy.copy(value) if isinstance(value, _CHANGING) and len(value) <= MOST_ITEMS else None


def same_contents(before: Any, now: Any) -> bool:
    """True if a container or array has the items of its copy; tensors and arrays inside have to be the same objects."""
    try:
        return np.array_equal(before, now) if isinstance(now, np.ndarray) else bool(before == now)
    except Exception:  # whatever users' objects raise, and several numbers, which have no truth value
        return False


def same_value(one: Any, other: Any) -> bool:
    """True for equal values of one type; tensors may be on different devices."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other.to(one.device)).all())
    return one is other or (type(one) is type(other) and same_contents(one, other))


def keeps_state(before: Any, now: Any) -> bool:
    """True if a change of this kind goes on from call to call, as counters do; what is missing is filled in once."""
    if isinstance(before, dict) and isinstance(now, dict):
        return any(keeps_state(value, now[key]) for key, value in before.items() if key in now)
    if isinstance(before, list) and isinstance(now, list):
        return any(map(keeps_state, before, now))
    return isinstance(before, bool | int | float | str) and not same_value(before, now)


def as_it_is(value: Any) -> Any:
    """The value, or a copy of a plain container, which may change without being replaced."""
    return copy.copy(value) if isinstance(value, _CHANGING) and is_plain(value) else value


def dotted(attribute: Attribute) -> str:
    """The path of a module with the name of its attribute: `encoder.temperature`."""
    names = (name for name in attribute[1].split(".") if name not in _BETWEEN)
    return ".".join(filter(None, (attribute[0], *names)))


def has_settings(value: Any) -> bool:
    """True for objects, except those of libraries, and for dictionaries that are not plain."""
    if is_plain(value) or isinstance(value, (*_NO_SETTINGS, *TOLD)):
        return False
    if isinstance(value, dict):
        return True
    of_library = type(value).__module__.partition(".")[0] in LIBRARIES
    return isinstance(value, NAMESPACES) or (not of_library and bool(_contents(value)))


def settings(name: str, value: Any) -> dict[str, Any]:
    """The plain values in an object with settings, and the objects between, by name; those of large ones are left out.

    Args:
        name: the name of the attribute that has the object.
        value: the object.
    """
    found: dict[str, Any] = {}
    for inner, content in _collected(name, value, set(), 0):
        found[inner] = content
        if len(found) > _MOST_SETTINGS:
            return {name: value}
    return found


def _collected(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    yield name, value
    seen.add(id(value))
    hidden = type(value).__module__.startswith("omegaconf")
    for key, inner in _contents(value).items():
        if not isinstance(key, str) or "." in key or id(inner) in seen or (hidden and key not in _OMEGACONF):
            continue
        if is_plain(inner):
            yield f"{name}.{key}", inner
        elif depth < _DEEPEST and has_settings(inner):
            yield from _collected(f"{name}.{key}", inner, seen, depth + 1)


def _contents(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    found: dict[Any, Any] = dict(own_attributes(value) or {})
    for name in (name for kind in type(value).__mro__ for name in _slots(kind)):
        with suppress(AttributeError):  # nothing is in the slot yet
            found[name] = object.__getattribute__(value, name)
    return found


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _own(owner: Any) -> dict[Any, Any]:
    return owner if isinstance(owner, dict) else own_attributes(owner) or {}


def _part(module: nn.Module, path: str) -> Any:
    """A part of the module; an empty dictionary if there is none."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return {}


class AttributePlace:
    """The place of an attribute's value: an object or dictionary, and the name there.

    Args:
        module: the module that paths begin at.
        attribute: the attribute.
    """

    def __init__(self, module: nn.Module, attribute: Attribute) -> None:
        path, name = attribute
        *outer, self.name = name.split(".")
        owner: Any = _part(module, path)
        for part in outer:
            own = _own(owner)
            owner = own[part] if part in own else getattr(owner, part, None)
        own = _own(owner)
        inside = isinstance(owner, dict) or (self.name in own and not isinstance(owner, type))
        self.owner = own if inside else owner

    @property
    def id(self) -> tuple[int, str]:
        """Equal for attributes of one object."""
        return id(self.owner), self.name

    @property
    def reader(self) -> Callable[[], Any]:
        """Reads the value, or None if there is none."""
        if isinstance(self.owner, dict):
            return functools.partial(self.owner.get, self.name)
        return functools.partial(getattr, self.owner, self.name, None)

    def read(self) -> Any:
        """The value, or None if there is none."""
        return self.reader()

    def write(self, value: Any) -> None:
        """Set the value."""
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


def originals(parts: Mapping[str, nn.Module], noted: Mapping[Attribute, Any]) -> dict[Attribute, Any]:
    """Values that were noted in a copy of a module, with the module's own functions, parts and objects in them.

    `parts`: the module's, by path.
    """

    def own(path: str, name: str) -> Any:
        return AttributePlace(parts[path], ("", name)).read() if path in parts else None

    return {key: value if is_plain(value) else own(*key) for key, value in noted.items()}
