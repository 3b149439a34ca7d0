"""The names that the user's code mentions, such as that of hooks and steps, without running it."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_gpp.user_code import names_reached, user_function


def names_in_hook(function: types.FunctionType, owners: Sequence[object]) -> frozenset[str]:
    """The names of attributes and functions in a hook, and in functions and methods of these objects that it calls."""
    return _names_in_function(function, tuple(dict.fromkeys(type(each) for each in owners)))


@functools.lru_cache(maxsize=256)
def _names_in_function(function: types.FunctionType, kinds: tuple[type, ...]) -> frozenset[str]:
    """The names, found once: several parts of a run ask for those of the same hook."""
    return frozenset(_names(function.__code__, kinds, function.__globals__))


def names_set(function: types.FunctionType) -> set[str]:
    """The names of attributes that a function sets, as `self.total = 0`."""
    return _arguments_of(function, "STORE_ATTR")


def _arguments_of(function: types.FunctionType, kind: str) -> set[Any]:
    return {each.argval for each in dis.get_instructions(function) if each.opname.startswith(kind)}


def _names(hook: types.CodeType, kinds: Sequence[type], known: Mapping[str, Any]) -> set[str]:
    def called(name: str) -> Iterator[types.CodeType]:
        for function in (user_function(known.get(name)), *(each for kind in kinds for each in _functions(kind, name))):
            if function is not None:
                yield function.__code__

    return names_reached(hook, names_in=lambda code: (*code.co_names, *_texts(code.co_consts)), called=called)


def _texts(constants: Iterable[object]) -> Iterator[str]:
    """Names in the texts among constants, and in tuples and sets there."""
    for each in constants:
        if isinstance(each, str):
            yield from (part for part in each.split(".") if part.isidentifier())
        elif isinstance(each, tuple | frozenset):
            yield from _texts(each)


def _functions(kind: type, name: str) -> Iterator[types.FunctionType]:
    """The function of a method or property, if the user has written it."""
    found: Any = inspect.getattr_static(kind, name, None)
    if isinstance(found, property | classmethod | staticmethod):
        found = found.fget if isinstance(found, property) else found.__func__
    if (function := user_function(found)) is not None:
        yield function
