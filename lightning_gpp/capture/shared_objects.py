"""Finds the containers and objects outside of the module tree in which users' code keeps something between calls.

Forwards keep masks by length and tables of positions in global variables, in classes, in variables of decorators, and
in objects that a module shares with its copies. Samplers and datasets count, and have random generators.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import Any, Final

from torch import Tensor, nn

from lightning_gpp._compat.torch import hooks_of
from lightning_gpp.capture.attributes import LIBRARIES, NAMESPACES, OF_EVERY_MODULE
from lightning_gpp.capture.own_streams import RandomSource
from lightning_gpp.user_code import is_user_code, own_attributes

Holder = dict[Any, Any] | list[Any] | set[Any] | deque[Any] | type
"""Something that may have a tensor in it: a container, a class, or the attributes of an object."""

DICTS: Final = (dict, OrderedDict, defaultdict)
SEQUENCES: Final = (list, tuple, set, frozenset, deque)
"""Types of containers, without classes that derive from them, whose methods may do anything."""
_DEEPEST: Final = 4
_DEEPEST_IN_LIBRARIES: Final = 12
_MOST_SEEN: Final = 10_000
"""Objects that are looked into in libraries, too."""
_MOST_ITEMS: Final = 64
"""Items of a container that are looked into."""
_MOST_HELD: Final = 1 << 14
"""Items of a container that may be a cache; larger ones are data."""
_INSTALLED: Final = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_NO_HOLDERS: Final = (Tensor, nn.Module, types.ModuleType, str, bytes, int, float, complex, type(None))


def holders(module: nn.Module) -> tuple[list[Holder], list[RandomSource]]:
    """The containers, classes and attributes of objects that the code of the module may share between calls.

    With the random generators in them.
    """
    reach = _Reach(set(map(type, module.modules())))
    for owner in module.modules():
        reach.all_of(value for name, value in vars(owner).items() if name not in OF_EVERY_MODULE)
        reach.all_of(hooks_of(owner), depth=-1)  # what they keep is in attributes of objects around them
    reach.scopes()
    return reach.found, reach.generators


def holders_around(values: Sequence[Any], apart: tuple[type, ...]) -> tuple[list[Holder], list[RandomSource]]:
    """The same that the code of objects may share, which objects of libraries may have inside, and its generators.

    Args:
        values: the objects, such as a loader, or the attributes of some.
        apart: classes of objects that are not looked into.
    """
    reach = _Reach(set(map(type, values)), apart)
    reach.through_libraries(values)
    reach.scopes()
    return reach.found, reach.generators


class _Reach:
    """Follows containers, functions and objects of the user's code.

    Args:
        kinds: the classes whose files are looked at, besides the user's.
        apart: classes of objects that are not followed.

    Attributes:
        found: what was found.
        generators: the random generators that were found.
    """

    def __init__(self, kinds: Set[type], apart: tuple[type, ...] = ()) -> None:
        files = _files_of(kinds)
        self.found: list[Holder] = []
        self.generators: list[RandomSource] = []
        self._scopes = [vars(file) for file in files.values()]
        self._files, self._libraries, self._apart = files.keys(), False, (*_NO_HOLDERS, *apart)
        self._seen: dict[int, Any] = {}

    def scopes(self) -> None:
        """Follow the global variables of the files."""
        for scope in self._scopes:
            self.add(scope)
            self.all_of(scope.values())

    def through_libraries(self, values: Iterable[Any]) -> None:
        """Follow objects of libraries, too."""
        self._libraries = True
        self.all_of(values)
        self._libraries = False

    def add(self, value: Any) -> None:
        """Note a holder, without a look into it."""
        self._seen[id(value)] = value
        container = type(value) in (*DICTS, list, set, deque) and len(value) <= _MOST_HELD
        if container or isinstance(value, type):
            self.found.append(value)

    def all_of(self, values: Iterable[Any], depth: int = 1) -> None:
        for value in list(values):
            if not isinstance(value, self._apart) and id(value) not in self._seen and self._goes_on(depth):
                if isinstance(value, RandomSource):
                    self.generators.append(value)
                inside = self._inside(value)
                if inside is not None:
                    self.add(value)
                    self.all_of(inside, depth + 1)

    def _goes_on(self, depth: int) -> bool:
        if self._libraries:
            return depth <= _DEEPEST_IN_LIBRARIES and len(self._seen) < _MOST_SEEN
        return depth <= _DEEPEST

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
        if isinstance(value, types.MethodType):
            return [value.__self__, value.__func__]
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        known = self._libraries or type(value).__module__ in self._files or isinstance(value, NAMESPACES)
        attributes = own_attributes(value) if known else None
        return None if attributes is None else [attributes, *([type(value)] if self._libraries else [])]


def _files_of(kinds: Set[type]) -> dict[str, types.ModuleType]:
    """The user's files, those that these classes are in, and those of the functions in these files."""
    own = {base.__module__ for kind in kinds for base in kind.__mro__}
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
