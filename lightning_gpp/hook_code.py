"""The names that the user's code mentions, such as that of hooks and steps, without running it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_gpp.user_code import names_reached, user_function

_HOOKS = ("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward")


def names_in_hooks(owners: Sequence[object], helpers: Sequence[object]) -> list[frozenset[str]]:
    """For each hook, the names of attributes and functions in it, and in the methods and functions that it calls.

    Names in texts count, too. A text that begins or ends with "_" is part of a name that the hook puts together
    (`getattr(self, "teacher_" + name)`), and gives the pattern of such names: `teacher_*`.

    Args:
        owners: a module and callbacks, whose hooks count.
        helpers: objects whose methods may be called there.
    """
    kinds = tuple(dict.fromkeys(type(each) for each in (*owners, *helpers)))
    hooks = [(type(owner), name) for owner in owners for name in dir(type(owner)) if _is_hook(name)]
    return [_names_in_function(function, kinds) for kind, name in hooks for function in _functions(kind, name)]


def names_in_hook(function: types.FunctionType, owners: Sequence[object]) -> frozenset[str]:
    """The names of attributes and functions in a hook, and in functions and methods of these objects that it calls."""
    return _names_in_function(function, tuple(dict.fromkeys(type(each) for each in owners)))


@functools.lru_cache(maxsize=256)
def _names_in_function(function: types.FunctionType, kinds: tuple[type, ...]) -> frozenset[str]:
    """The names, found once: several parts of a run ask for those of the same hook."""
    return frozenset(_names(function.__code__, kinds, function.__globals__))


def _is_hook(name: str) -> bool:
    return name.startswith("on_") or name in _HOOKS


def _names(hook: types.CodeType, kinds: Sequence[type], known: Mapping[str, Any]) -> set[str]:
    def called(name: str) -> Iterator[types.CodeType]:
        for function in (user_function(known.get(name)), *(each for kind in kinds for each in _functions(kind, name))):
            if function is not None:
                yield function.__code__

    return names_reached(hook, names_in=lambda code: (*code.co_names, *_texts(code.co_consts)), called=called)


def _texts(constants: Iterable[object]) -> Iterator[str]:
    """Names and patterns of names in the texts among constants, and in tuples and sets there."""
    for each in constants:
        if isinstance(each, str):
            yield from (found for part in each.split(".") if part.isidentifier() for found in _patterns(part))
        elif isinstance(each, tuple | frozenset):
            yield from _texts(each)


def _patterns(text: str) -> Iterator[str]:
    yield text
    if text.strip("_"):  # "_" alone would be part of all private names
        if text.endswith("_"):
            yield f"{text}*"
        if text.startswith("_"):
            yield f"*{text}"


def _functions(kind: type, name: str) -> Iterator[types.FunctionType]:
    """The function of a method or property, if the user has written it."""
    found: Any = inspect.getattr_static(kind, name, None)
    if isinstance(found, property | classmethod | staticmethod):
        found = found.fget if isinstance(found, property) else found.__func__
    if (function := user_function(found)) is not None:
        yield function
