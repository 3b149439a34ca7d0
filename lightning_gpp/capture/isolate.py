"""Copies the user's module for a recording: same code, fake parameters, and no shared state that recording changes."""

from __future__ import annotations

import copy
import functools
import io
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_gpp._compat.torch import FakeTensorMode, fake_like, replace_calls, uncompiled, wraps_compiled
from lightning_gpp.capture.attributes import FRAMEWORKS, MOST_NUMBERS
from lightning_gpp.capture.kept import RandomSource, is_plain_object
from lightning_gpp.errors import CaptureError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.runtime.named_tensors import tensors_of

_CONTAINERS = (list, dict, set, tuple, deque)
_COPIED = (nn.Module, types.MethodType, functools.partial, RandomSource)
_DEEPEST = 4


def isolated_copy(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """A `private_copy` in which every parameter and buffer is fake."""
    return private_copy(module, lambda _, tensor: fake_like(tensor, mode, device))


def private_copy(
    module: nn.Module,
    made: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    others: Mapping[int, Any] = {},
) -> nn.Module:
    """A deep copy of the module tree: of its parts, parameters and buffers, containers, small arrays, random
    generators, and plain objects of the user's. Everything else is shared: data sets, loaders, loggers, the trainer,
    tensors in attributes, and objects that say how they are made or copied. Iterators and open files refuse to be read.

    Methods compiled in place (`module.compile()`, `self.step = torch.compile(self.step)`) are not compiled in the copy.
    Functions that are kept in the tree, such as hooks, see the copy where they saw the module.

    Args:
        made: makes the parameters and buffers of the copy, from the name and the tensor of each; without it they are
            copied.
        others: replacements of other objects, by their id.
    """
    tensors = tensors_of(module).items() if made is not None else ()
    survey = _Survey(module, {**others, **{id(tensor): made(name, tensor) for name, tensor in tensors if made}})
    memo, functions = survey.memo, survey.functions
    memo |= {place: _reopened(function) for place, function in functions.items()}
    replica = copy.deepcopy(module, memo)
    for place, function in functions.items():
        _close(memo[place], function, memo)
    for owner in module.modules():
        if id(owner) in memo and not wraps_compiled(owner):
            _uncompile(owner, memo)
    return replica


class _Survey:
    """Finds what a copy of a module tree shares with it, and puts it into the memo, as itself or as `Unread`.

    Attributes:
        functions: functions in the tree that see variables of the code around them, perhaps a module, by id.
    """

    def __init__(self, module: nn.Module, memo: dict[int, Any]) -> None:
        self.memo, self.functions = memo, dict[int, types.FunctionType]()
        self._seen = {*map(id, (*module.parameters(), *module.buffers())), *memo}
        for owner in module.modules():
            for name, value in vars(owner).items():
                self._look_at(name, value, 0)

    def _look_at(self, name: str, value: Any, depth: int) -> None:
        """`name`: of the attribute. `depth`: number of the containers and objects around it."""
        while isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, types.MethodType) and type(value.__self__).__module__.partition(".")[0] in FRAMEWORKS:
            value = value.__self__  # such as a profiler with hooks, which may not be copied
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, types.FunctionType) and value.__closure__:
            self.functions[id(value)] = value
        elif _is_read(value):
            self.memo[id(value)] = Unread(name)
        elif not _is_copied(value, depth):
            self.memo[id(value)] = value
        elif depth < _DEEPEST:
            contents = vars(value) if is_plain_object(value) else value if isinstance(value, _CONTAINERS) else ()
            for item in list(contents.values() if isinstance(contents, dict) else contents):
                self._look_at(name, item, depth + 1)


def _reopened(function: types.FunctionType) -> types.FunctionType:
    """The function, with variables of its own that have no values yet."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    fresh = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    fresh.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(fresh, function)
    return fresh


def _close(fresh: types.FunctionType, function: types.FunctionType, memo: dict[int, Any]) -> None:
    """Give a copied function's variables the original's values, or the copies of these."""
    for cell, known in zip(fresh.__closure__ or (), function.__closure__ or (), strict=True):
        try:
            value = known.cell_contents
        except ValueError:  # a variable without a value
            continue
        owner = getattr(value, "__self__", None) if isinstance(value, types.MethodType) else None
        if owner is not None and id(owner) in memo:
            cell.cell_contents = types.MethodType(value.__func__, memo[id(owner)])
        else:
            small = type(value) in _CONTAINERS and len(value) <= MOST_NUMBERS
            cell.cell_contents = memo.get(id(value), copy.copy(value) if small else value)


def _uncompile(owner: nn.Module, memo: dict[int, Any]) -> None:
    """Replace compiled methods of a copied module by plain ones, because they use the original's parameters."""
    replace_calls([memo[id(owner)]], [None])  # computes with the original's parameters
    replica = vars(memo[id(owner)])
    for name, value in vars(owner).items():
        plain = uncompiled(value)
        if plain is not value and isinstance(plain, types.MethodType) and id(plain.__self__) in memo:
            replica[name] = types.MethodType(plain.__func__, memo[id(plain.__self__)])


class Unread:
    """Stands for an iterator or file in a copy of a module, and refuses to be read. `name`: that of the attribute."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, method: str) -> Any:
        if method in ("write", "writelines", "flush"):  # the numbers of a recording are invented
            return lambda *_: None
        raise CaptureError(
            f"The step reads {self.name!r}, an iterator or open file that the module keeps. Set-up runs the step on a "
            "copy of the module, so training would start with later items. Let the data have its samples (Lightning's "
            "CombinedLoader), or read them in on_train_batch_start and keep what was read in an attribute."
        )

    def __iter__(self) -> Any:
        return self.__getattr__("__iter__")

    __next__ = __iter__


def _is_read(value: Any) -> bool:
    if isinstance(value, io.IOBase):
        return not value.closed
    return isinstance(value, Iterator) and not isinstance(value, nn.Module | Unread)


def _is_copied(value: Any, depth: int) -> bool:
    """`depth`: that of the containers and objects around it; large containers in others are data."""
    if isinstance(value, np.ndarray):
        return value.size <= MOST_NUMBERS
    if isinstance(value, _CONTAINERS):
        return depth == 0 or len(value) <= MOST_NUMBERS
    return isinstance(value, _COPIED) or is_plain_object(value)


def add_sizes(graph: OperatorGraph, module: nn.Module) -> None:
    """Add the sizes of the module's parameters and buffers to its graph."""
    for name, tensor in tensors_of(module).items():
        size = tensor.numel() * tensor.element_size()
        if isinstance(tensor, nn.Parameter):
            graph.parameter_bytes[name], graph.parameter_sizes[name] = size, tensor.numel()
        else:
            graph.buffer_bytes[name] = size
