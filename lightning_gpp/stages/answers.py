"""Answers to the user's calls of modules, in place of their forwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from lightning_gpp._compat.torch import replace_call

Answer = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
CallHandler = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class _Call:
    """The call of a module that is answered. Copies and pickles of the module have none, so they call themselves."""

    def __init__(self, module: nn.Module, answer: Answer) -> None:
        self._module, self._answer = module, answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(self._module, args, kwargs)

    def __reduce__(self) -> Any:
        return type(None), ()


class Answers:
    """Answers calls of modules, wherever they are called from.

    Args:
        modules: the modules.
        answer: returns the result of a call from the module and its arguments.
    """

    def __init__(self, modules: Iterable[nn.Module], answer: Answer) -> None:
        self._calls = [(module, _Call(module, answer)) for module in modules]
        self._own: list[Any] | None = None

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
        active = self._own is not None
        self._detach()
        try:
            yield
        finally:
            if active:
                self._attach()

    def _attach(self) -> None:
        self._own = [replace_call(module, call) for module, call in self._calls]

    def _detach(self) -> None:
        for (module, _), own in zip(self._calls, self._own or (), strict=self._own is not None):
            replace_call(module, own)
        self._own = None


def answered(modules: Mapping[str, nn.Module], answer: CallHandler) -> AbstractContextManager[None]:
    """A context in which a call of one of the modules returns `answer(call number, module, args, kwargs)`."""
    numbers = itertools.count()
    return Answers(modules.values(), lambda module, args, kwargs: answer(next(numbers), module, args, kwargs)).given()
