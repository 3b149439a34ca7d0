"""Copies of optimizers on small tensors, for trials that leave no trace in the optimizer."""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

_VALUES: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
_SMALL: Final = 64
"""Numbers of a tensor that is copied as it is."""
_HOOKS: Final = "_optimizer_"
"""Begin of the names under which optimizers keep hooks, which may do anything."""
_PATCHED: Final = ("step", "_opt_called")
"""Attributes that schedulers put into an optimizer; its method `step` steps the original."""
_RATE: Final = 1e-3
"""Stands for a learning rate of zero, with which a schedule may begin."""

Optimizing = TypeVar("Optimizing", bound=Optimizer)


def small_copy(optimizer: Optimizing, small: Mapping[int, Tensor]) -> Optimizing:
    """A copy of an optimizer on other parameters, with its hyperparameters, the beginning of its state, and no hooks.

    Args:
        optimizer: the optimizer.
        small: by the id of a parameter the one that stands for it, no larger along any dimension. Others are left out.

    Raises:
        TypeError: the optimizer keeps an object that cannot be copied without doubt, such as a function or a module.
    """
    copied = _Copier(optimizer, small).optimizer(optimizer)
    for group in copied.param_groups:
        if group.get("lr") == 0:
            group["lr"] = _RATE
    return copied


class _Copier:
    def __init__(self, optimizer: Optimizer, small: Mapping[int, Tensor]) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._left_out = {id(each) for each in parameters if id(each) not in small}
        self._known: dict[int, Any] = dict(small)
        for parameter in parameters:
            if id(parameter) in small:
                self._cut(optimizer.state.get(parameter, {}), parameter, small[id(parameter)])

    def _cut(self, state: Mapping[str, Any], parameter: Tensor, small: Tensor) -> None:
        """Know the beginning of the state that has the parameter's shape."""
        for value in state.values():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                beginning = value[tuple(slice(size) for size in small.shape)].detach().clone()
                self._known[id(value)] = beginning.to(small.dtype) if value.is_floating_point() else beginning

    def optimizer(self, optimizer: Optimizing) -> Optimizing:
        copied: Optimizing = object.__new__(type(optimizer))
        self._known[id(optimizer)] = copied
        for name, value in vars(optimizer).items():
            if name not in _PATCHED:
                vars(copied)[name] = type(value)() if name.startswith(_HOOKS) else self._copy(value)
        return copied

    def _copy(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, (*_VALUES, types.BuiltinFunctionType)):
            return value
        if isinstance(value, Optimizer):
            return self.optimizer(value)
        if isinstance(value, Tensor) and value.numel() <= _SMALL:
            return value.detach().clone()
        return self._container(value)

    def _container(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._copy(each) for each in value if id(each) not in self._left_out)
        if not isinstance(value, dict | list | set | deque):
            raise TypeError(f"{type(value).__name__} is not copied.")
        copied: Any = copy.copy(value)
        self._known[id(value)] = copied
        copied.clear()
        if isinstance(value, dict):
            kept = {key: each for key, each in value.items() if id(key) not in self._left_out}
            copied.update({self._copy(key): self._copy(each) for key, each in kept.items()})
        else:
            items = [self._copy(each) for each in value if id(each) not in self._left_out]
            copied.update(items) if isinstance(value, set) else copied.extend(items)
        return copied
