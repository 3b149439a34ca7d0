"""Finds the containers and objects outside of the module tree in which users' code may keep tensors.

Forwards keep masks by length and tables of positions in global variables, in classes, in variables of decorators, and
in objects that a module shares with its copies.
"""

from __future__ import annotations

import sys
import sysconfig
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from torch import Tensor, nn

from lightning_gpp.capture.attributes import LIBRARIES, OF_EVERY_MODULE
from lightning_gpp.user_code import is_user_code

Holder = dict[Any, Any] | list[Any] | set[Any] | deque[Any] | type
"""Something that may have a tensor in it: a container, a class, or the attributes of an object."""

DICTS: Final = (dict, OrderedDict, defaultdict)
SEQUENCES: Final = (list, tuple, set, frozenset, deque)
"""Types of containers, without classes that derive from them, whose methods may do anything."""
_DEEPEST: Final = 4
_MOST_ITEMS: Final = 64
"""Items of a container that are looked into."""
_MOST_HELD: Final = 1 << 14
"""Items of a container that may be a cache; larger ones are data."""
_INSTALLED: Final = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_NO_HOLDERS: Final = (Tensor, nn.Module, types.ModuleType, str, bytes, int, float, complex, type(None))


def holders(module: nn.Module) -> list[Holder]:
    """The containers, classes and attributes of objects that the code of the module may share between calls."""
    reach = _Reach(module)
    for owner in module.modules():
        reach.all_of(value for name, value in vars(owner).items() if name not in OF_EVERY_MODULE)
    for scope in reach.scopes:
        reach.add(scope)
        reach.all_of(scope.values())
    return reach.found


class _Reach:
    """Follows containers, functions and objects of the user's code.

    Attributes:
        scopes: the global variables of the files that are looked at.
        found: what was found.
    """

    def __init__(self, module: nn.Module) -> None:
        files = _files_of(module)
        self.scopes = [vars(file) for file in files.values()]
        self.found: list[Holder] = []
        self._files = files.keys()
        self._seen: dict[int, Any] = {}

    def add(self, value: Any) -> None:
        """Note a holder, without a look into it."""
        self._seen[id(value)] = value
        container = type(value) in (*DICTS, list, set, deque) and len(value) <= _MOST_HELD
        if container or isinstance(value, type):
            self.found.append(value)

    def all_of(self, values: Iterable[Any], depth: int = 1) -> None:
        for value in list(values):
            if not isinstance(value, _NO_HOLDERS) and id(value) not in self._seen and depth <= _DEEPEST:
                inside = self._inside(value)
                if inside is not None:
                    self.add(value)
                    self.all_of(inside, depth + 1)

    def _inside(self, value: Any) -> Iterable[Any] | None:
        """The holder of what is in a value; None if it is of no interest."""
        if type(value) in DICTS:
            return islice(value.values(), _MOST_ITEMS)
        if type(value) in SEQUENCES:
            return islice(value, _MOST_ITEMS)
        if isinstance(value, type):
            return vars(value).values() if value.__module__ in self._files else None
        if isinstance(value, staticmethod | classmethod):
            return [value.__func__]
        if isinstance(value, types.FunctionType):
            return _kept_by(value) if value.__module__ in self._files else None
        return [vars(value)] if type(value).__module__ in self._files and hasattr(value, "__dict__") else None


def _files_of(module: nn.Module) -> dict[str, types.ModuleType]:
    """The user's files, those that the module's classes are in, and those of the functions in these files."""
    own = {base.__module__ for kind in set(map(type, module.modules())) for base in kind.__mro__}
    imported = {
        getattr(value, "__module__", None)
        for name in own & sys.modules.keys()
        if name.partition(".")[0] not in LIBRARIES
        for value in list(vars(sys.modules[name]).values())
        if isinstance(value, types.FunctionType)
    }
    return {
        name: file
        for name, file in list(sys.modules.items())
        if name.partition(".")[0] not in LIBRARIES and (name in own or name in imported or _is_users(name, file))
    }


def _is_users(name: str, file: types.ModuleType) -> bool:
    path = vars(file).get("__file__") or ""
    return name == "__main__" or (bool(path) and is_user_code(path) and not path.startswith(_INSTALLED))


def _kept_by(function: types.FunctionType) -> Iterator[Any]:
    """The values that a function keeps from call to call: defaults, attributes, and variables of the code around it."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if vars(function):
        yield vars(function)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable without a value
            continue
