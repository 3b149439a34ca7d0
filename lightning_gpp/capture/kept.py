"""Finds what objects keep between calls: containers, attributes of plain objects, and random generators.

A copy of a module has its own, and a run that does not count leaves them as they are. What is outside of the module
(global variables, classes, closures, the trainer) is neither copied nor restored.
"""

from __future__ import annotations

import functools
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import is_
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from lightning_gpp.capture.attributes import NAMESPACES, OF_EVERY_MODULE, is_users
from lightning_gpp.user_code import own_attributes

Holder = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
"""A container, or the attributes of an object."""
RandomSource = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A random generator of the user's own."""

_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
"""Types of containers, without classes that derive from them, whose methods may do anything."""
CHANGING: Final = frozenset({*_DICTS, *_SEQUENCES} - {tuple, frozenset})
"""Those whose contents may change."""
_NO_HOLDERS: Final = (
    nn.Parameter,
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    str,
    bytes,
    int,
    float,
    type(None),
)
_DEEPEST: Final = 4
_DEEPEST_IN_LIBRARIES: Final = 12
_MOST_SEEN: Final = 10_000
"""Objects that are looked into."""
_MOST_ITEMS: Final = 64
"""Items of a container that are looked into."""
_TELLING: Final = (
    *("__getattr__", "__getattribute__", "__del__", "__slots__", "__new__"),
    *("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
)
"""Methods of classes that say how their objects are made, read, copied or deleted."""
_ABSTRACT: Final = ("abc", "typing")
"""Modules with bases of classes that change nothing about their objects."""


def is_plain_object(value: Any) -> bool:
    """True for a namespace, and for an object of a class of the user's that derives from no class of a library and says
    nothing about how its objects are made, read, copied or deleted.
    """
    kind = type(value)
    if kind not in _PLAIN_KINDS:
        _PLAIN_KINDS[kind] = _is_plain_kind(kind)
    return _PLAIN_KINDS[kind]


_PLAIN_KINDS: Final = WeakKeyDictionary[type, bool]()


def _is_plain_kind(kind: type) -> bool:
    own = [base for base in kind.__mro__[:-1] if base.__module__ not in _ABSTRACT]
    says = any(name in vars(base) for base in own for name in _TELLING)
    return kind in NAMESPACES or (bool(own) and not says and all(is_users(base.__module__) for base in own))


class Kept:
    """Finds what objects keep.

    Args:
        values: the objects, such as a loader, or the attributes of a module.
        libraries: whether objects of libraries are looked into, too.
        apart: classes of objects that are not looked into.

    Attributes:
        holders: the containers, and the attributes of objects.
        generators: the random generators.
        tensors: tensors besides parameters.
    """

    def __init__(self, values: Iterable[Any], *, libraries: bool = False, apart: tuple[type, ...] = ()) -> None:
        self.holders: list[Holder] = []
        self.generators: list[RandomSource] = []
        self.tensors: list[Tensor] = []
        self._libraries, self._apart = libraries, (*_NO_HOLDERS, *apart)
        self._deepest = _DEEPEST_IN_LIBRARIES if libraries else _DEEPEST
        self._seen: dict[int, Any] = {}
        self._look_at(values, 1)

    def _look_at(self, values: Iterable[Any], depth: int) -> None:
        for value in list(values):
            if isinstance(value, self._apart) or id(value) in self._seen or len(self._seen) > _MOST_SEEN:
                continue
            self._seen[id(value)] = value
            if isinstance(value, RandomSource):
                self.generators.append(value)
            elif isinstance(value, Tensor):
                self.tensors.append(value)
            elif depth <= self._deepest:
                self._look_at(self._inside(value), depth + 1)

    def _inside(self, value: Any) -> Iterable[Any]:
        """The contents of a value, which is noted if it is a holder."""
        kind = type(value)
        if kind in _DICTS or kind in _SEQUENCES:
            if kind in CHANGING:
                self.holders.append(value)
            return islice(value.values() if kind in _DICTS else value, _MOST_ITEMS)
        if isinstance(value, types.MethodType):
            return [value.__self__]
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        attributes = own_attributes(value) if self._libraries or is_plain_object(value) else None
        return [] if attributes is None else [attributes]


def kept_by(modules: Iterable[nn.Module]) -> Kept:
    """Find what the attributes of modules keep."""
    return Kept(value for part in modules for name, value in vars(part).items() if name not in OF_EVERY_MODULE)


@contextmanager
def unchanged(holders: Sequence[Holder], most: int = 1 << 14) -> Iterator[None]:
    """Restore containers and attributes afterwards; lists of more than `most` items are only shortened again."""
    before = [(holder, _copied(holder)) for holder in holders if len(holder) <= most]
    long = [(holder, len(holder)) for holder in holders if len(holder) > most and isinstance(holder, list)]
    try:
        yield
    finally:
        for holder, known in before:
            if _differs(holder, known):
                holder.clear()
                holder.extend(known) if isinstance(holder, list | deque) else holder.update(known)
        for items, length in long:
            del items[length:]


def _copied(holder: Holder) -> Any:
    return dict(holder) if isinstance(holder, dict) else list(holder)


def _differs(holder: Holder, known: Any) -> bool:
    now = _copied(holder)
    if isinstance(now, dict):
        return list(now) != list(known) or not all(map(is_, now.values(), known.values()))
    return len(now) != len(known) or not all(map(is_, now, known))


def _state_of(generator: RandomSource) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: RandomSource, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


@contextmanager
def unmoved(generators: Sequence[RandomSource]) -> Iterator[None]:
    """Restore generators afterwards."""
    before = list(map(_state_of, generators))
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            _set_state(generator, state)
