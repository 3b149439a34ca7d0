"""Attributes of modules that forwards read: numbers, flags, texts and tensors that are no parameters or buffers.

A forward that is cut into stages runs with the values that it had when it was captured, so these are noted.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
import torchmetrics
from torch import nn

Attribute = tuple[str, str]
"""The path of a module, and the name of its attribute."""

_OF_ALL_MODULES: Final = frozenset(vars(nn.Module()))
_MOST_ITEMS: Final = 64
"""Items of a container whose values are noted."""


class AttributeObserver(Protocol):
    """Is told of the attributes of modules that are read and set."""

    def read(self, path: str, name: str, value: Any) -> None:
        """An attribute of a module is read that the run has not set."""

    def changed(self, path: str, name: str) -> None:
        """A number, flag or text is changed for the first time, by code that may have read it."""


def observe(module: nn.Module, observer: AttributeObserver) -> None:
    """Tell the observer of reads and changes of the attributes that users may change.

    Args:
        module: a copy of the user's module, whose parts get classes of their own.
        observer: is told.
    """
    for path, part in module.named_modules():
        if not _is_called_as_it_is(part):
            _observe(part, set(_names(part)), path, observer)


def is_plain(value: Any) -> bool:
    """True for values that can be compared: numbers, texts, None, tensors, and containers of a few of the former."""
    if isinstance(value, list | tuple | set | frozenset | dict):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return len(items) <= _MOST_ITEMS and all(isinstance(item, _SCALARS) for item in items)
    return isinstance(value, (*_SCALARS, torch.Tensor))


_SCALARS: Final = (bool, int, float, complex, str, type(None))


def _names(part: nn.Module) -> list[str]:
    hidden = hasattr(part, "log_dict")  # the state of a LightningModule, which Lightning changes
    own = (name for name in vars(part) if name not in _OF_ALL_MODULES and not (hidden and name.startswith("_")))
    return ["training", *(name for name in own if is_plain(vars(part)[name]))]


def _is_called_as_it_is(part: nn.Module) -> bool:
    """True for metrics, which the step calls, and for layers of torch, which stages call."""
    if isinstance(part, torchmetrics.Metric | torchmetrics.MetricCollection):
        return True
    return type(part).__module__.startswith("torch.nn") and not any(True for _ in part.children())


def _observe(part: nn.Module, names: set[str], path: str, observer: AttributeObserver) -> None:
    kind = type(part)

    def read(self: nn.Module, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name in names:
            observer.read(path, name, value)
        return value

    def write(self: nn.Module, name: str, value: Any) -> None:
        before = vars(self).get(name)
        if name in names and isinstance(before, bool | int | float | str) and not _equals(before, value):
            observer.changed(path, name)
        names.discard(name)
        kind.__setattr__(self, name, value)

    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    about |= {"__getattribute__": read, "__setattr__": write}  # type: ignore[dict-item]
    try:
        object.__setattr__(part, "__class__", type(kind.__name__, (kind,), about))
    except TypeError:  # a class that allows no other layout, as those of torch.jit
        return


def _equals(before: bool | float | str, value: Any) -> bool:
    return type(value) is type(before) and bool(value == before)
