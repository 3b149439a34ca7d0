"""Tensors without values that a recording has left outside of its copy of the module, as in a cache that forwards fill.

Training would compute with them. A recording knows the values of tensors that are made of numbers alone, so caches of
masks and positions have values, and are no problem.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from lightning_gpp._compat.torch import FakeTensor, FakeTensorMode
from lightning_gpp.capture.attributes import LIBRARIES, OF_EVERY_MODULE, dotted, is_users
from lightning_gpp.errors import ConfigError

_CONTAINERS: Final = (dict, OrderedDict, defaultdict, list, tuple, set, deque)
_WRAPPERS: Final = (
    *(types.CellType, types.MethodType, staticmethod, classmethod, functools.partial),
    type(functools.lru_cache(int)),
)
_DEEPEST: Final = 8
"""Objects on the way from a variable to a tensor in it: a function, its closure, a variable there, its dictionary."""
_MOST_ITEMS: Final = 1 << 14
"""Items of a container that may be a cache; larger ones are data."""


@contextmanager
def none_left(module: nn.Module, modes: Sequence[FakeTensorMode]) -> Iterator[None]:
    """Refuse user code that keeps a tensor of a recording. `modes`: those of the recordings, filled in inside.

    Raises:
        ConfigError: names the variable or attribute that keeps a tensor.
    """
    try:
        yield
    finally:
        if holder := _holder(module, set(map(id, modes))):
            raise ConfigError(
                f"Set-up ran the step on tensors without values, and {holder} keeps one of them: training would "
                "compute with it. Keep it in the module, as an attribute or a buffer (register_buffer), of which "
                "set-up uses a copy; or fill it before training, in __init__ or setup()."
            )


def _holder(module: nn.Module, modes: Collection[int]) -> str:
    """The first variable of the user's files, or attribute of the module, that keeps a tensor of these modes."""
    files = _files(module)
    seen = {id(vars(file)) for file in files.values()}
    for words, value in (*_variables(files), *_attributes(module)):
        if _keeps(value, modes, files, seen):
            return words
    return ""


def _files(module: nn.Module) -> dict[str, types.ModuleType]:
    """The files that are not installed, and those of the module's classes."""
    own = {base.__module__ for part in module.modules() for base in type(part).__mro__}
    return {
        name: file
        for name, file in list(sys.modules.items())
        if name.partition(".")[0] not in LIBRARIES
        and isinstance(file, types.ModuleType)
        and (name in own or is_users(name))
    }


def _variables(files: Mapping[str, types.ModuleType]) -> Iterator[tuple[str, Any]]:
    for name, file in files.items():
        yield from ((f"{variable} of {name}", value) for variable, value in list(vars(file).items()))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        own = ((name, value) for name, value in vars(part).items() if name not in OF_EVERY_MODULE)
        yield from ((f"the attribute {dotted((path, name))}", value) for name, value in own)


def _keeps(start: Any, modes: Collection[int], files: Collection[str], seen: set[int]) -> bool:
    """True if a tensor of these modes is in an object; `seen`: what was looked at before."""
    ring = [start]
    for _ in range(_DEEPEST):
        if any(type(each) is FakeTensor and id(each.fake_mode) in modes for each in ring):
            return True
        new = {id(each): each for each in ring if id(each) not in seen and _is_followed(each, files)}
        seen |= new.keys()
        ring = gc.get_referents(*new.values())
    return False


def _is_followed(value: Any, files: Collection[str]) -> bool:
    if type(value) in _CONTAINERS:
        return len(value) <= _MOST_ITEMS
    if isinstance(value, types.FunctionType | type):
        return value.__module__ in files
    return isinstance(value, _WRAPPERS) or type(value).__module__ in files
