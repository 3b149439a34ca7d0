"""Notes what forwards read and change of the attributes of their modules.

A forward that is cut into stages runs with the values that it had when it was captured.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch
import torchmetrics
from torch import nn

from lightning_gpp._compat.lightning_module import LIGHTNING_STATE
from lightning_gpp._compat.torch import CHILDREN
from lightning_gpp.capture.attributes import (
    CLASS,
    LIBRARIES,
    OF_EVERY_MODULE,
    OWN,
    SCALARS,
    has_settings,
    is_plain,
    keeps_state,
    same_value,
)

_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_METHODS: Final = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_FUNCTIONS: Final = (types.FunctionType, staticmethod)


class AttributeObserver(Protocol):
    """Is told of the attributes of modules that are read and set."""

    def read(self, path: str, name: str, value: Any) -> None:
        """An attribute of a module is read that the run has not set."""

    def changed(self, path: str, name: str) -> None:
        """A number, flag or text is changed for the first time, by code that may have read it."""

    def set(self, path: str, name: str, changes: bool) -> None:
        """An attribute is set; `changes` is true for a number, flag or text that gets another value."""

    def read_again(self, path: str, name: str) -> None:
        """An attribute is read that the run has set."""


def observe(module: nn.Module, observer: AttributeObserver) -> None:
    """Tell the observer of reads and changes of the attributes that users may change.

    Args:
        module: a copy of the user's module, whose parts get classes of their own.
        observer: is told.
    """
    for path, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule) and not _is_called_as_it_is(part):
            _observe(part, _names(part), path, observer)


def _names(part: nn.Module) -> set[str]:
    return {"training"} | (vars(part).keys() - OF_EVERY_MODULE - LIGHTNING_STATE)


def _of_class(kind: type) -> dict[str, Any]:
    """Values of the user's classes."""
    users = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in LIBRARIES]
    return _settings({name: value for base in reversed(users) for name, value in vars(base).items()})


def _functions(kind: type) -> set[str]:
    """Names of the functions of the user's classes that an instance may replace; the steps and forwards are others."""
    users = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in LIBRARIES]
    found = {name for base in users for name, value in vars(base).items() if isinstance(value, _FUNCTIONS)}
    return {name for name in found if name[:2] != "__" and name not in _METHODS}


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name[:2] != "__" and _is_setting(value)}


def _is_setting(value: Any) -> bool:
    return is_plain(value) or has_settings(value)


def _is_called_as_it_is(part: nn.Module) -> bool:
    """True for metrics, which the step calls, and for layers of torch, which stages call."""
    if isinstance(part, torchmetrics.Metric | torchmetrics.MetricCollection):
        return True
    return type(part).__module__.startswith("torch.nn") and not any(True for _ in part.children())


def _observe(part: nn.Module, names: set[str], path: str, observer: AttributeObserver) -> None:
    kind = type(part)
    of_class = {name: value for name, value in _of_class(kind).items() if name not in vars(part)}
    functions = _functions(kind) - vars(part).keys()
    written = set[str]()

    def read(self: nn.Module, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name == CHILDREN and isinstance(self, _CONTAINERS):
            read_parts(value)
        elif name == "forward":  # which is perhaps called without the hooks of modules
            read_class()
        elif name in names or name in of_class:
            observer.read(path, name, value)
        elif name in functions:
            observer.read(path, f"{OWN}.{name}", None)
            observer.read(path, f"{CLASS}.{name}", getattr(kind, name))
        elif name in written:
            observer.read_again(path, name)
        return value

    def read_class() -> None:
        for name, value in list(of_class.items()):
            observer.read(path, name, value)

    def read_part(self: nn.Module, name: str) -> Any:
        value = kind.__getattr__(self, name)
        if isinstance(value, nn.Module):
            read_parts({name: value})
        return value

    def read_parts(parts: Mapping[str, nn.Module]) -> None:
        for name, value in parts.items():
            if "." not in name:
                observer.read(path, f"{CHILDREN}.{name}", value)

    def write(self: nn.Module, name: str, value: Any) -> None:
        before = vars(self).get(name, of_class.get(name))
        if (name in names or name in of_class) and keeps_state(before, value):
            observer.changed(path, name)
        if name != "training" and not isinstance(value, nn.Module):
            written.add(name)
            observer.set(path, name, isinstance(value, SCALARS) and not same_value(before, value))
        names.discard(name)
        functions.discard(name)
        of_class.pop(name, None)
        kind.__setattr__(self, name, value)

    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    about |= {"__getattribute__": read, "__getattr__": read_part, "__setattr__": write}  # type: ignore[dict-item]
    try:
        object.__setattr__(part, "__class__", type(kind.__name__, (kind,), about))
    except TypeError:  # a class that allows no other layout, as those of torch.jit
        return
    part.register_forward_pre_hook(lambda *_: read_class())
