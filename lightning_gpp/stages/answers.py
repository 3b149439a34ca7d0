"""Answers to the user's calls of modules: while a step runs, its network calls return what stages compute."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

CallHandler = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@functools.cache
def _answering(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind` that differs only in that its calls are answered."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_ANSWER](self, args, kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


_ANSWER: Final = "_gpp_answer"


class Answers:
    """Answers calls of modules, wherever they are called from.

    Args:
        modules: the modules.
        answer: returns the result of a call from the module and its arguments.
    """

    def __init__(
        self, modules: Iterable[nn.Module], answer: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        self._modules, self._answer = [(module, type(module)) for module in modules], answer
        self._active = False

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside, calls are answered."""
        self._attach()
        try:
            yield
        finally:
            self._detach()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside `given`, modules are called as usual for a while; elsewhere, nothing changes."""
        active = self._active
        self._detach()
        try:
            yield
        finally:
            if active:
                self._attach()

    def _attach(self) -> None:
        self._active = True
        for module, kind in self._modules:
            vars(module)[_ANSWER] = self._answer
            module.__class__ = _answering(kind)  # type: ignore[arg-type]

    def _detach(self) -> None:
        self._active = False
        for module, kind in self._modules:
            module.__class__ = kind
            vars(module).pop(_ANSWER, None)


@contextmanager
def answered(modules: Mapping[str, nn.Module], answer: CallHandler) -> Iterator[None]:
    """Inside, a call of one of the modules returns `answer(call number, module, args, kwargs)`."""
    numbers = itertools.count()

    def numbered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return answer(next(numbers), module, args, kwargs)

    kinds = [(module, type(module)) for module in modules.values()]
    try:
        for module, kind in kinds:
            vars(module)[_ANSWER] = numbered
            module.__class__ = _answering(kind)  # type: ignore[arg-type]
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind
            vars(module).pop(_ANSWER, None)


_NOT_ITS_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, hooks and the like."""


@contextmanager
def without_effects(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore attributes that were set, and lists that grew, when the context ends.

    Changes inside other objects stay.
    """
    before = [(module, dict(vars(module)), _lists(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, lists in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            for items, length in lists:
                del items[length:]


def _lists(module: nn.Module) -> list[tuple[list[Any], int]]:
    own = (value for name, value in vars(module).items() if name not in _NOT_ITS_OWN)
    return [(value, len(value)) for value in own if type(value) is list]
