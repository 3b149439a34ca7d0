"""Answers to the user's calls of modules, in place of their forwards."""

from __future__ import annotations

import copyreg
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from torch import nn

CallHandler = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
Kinds = Sequence[tuple[nn.Module, type[nn.Module]]]
"""Modules with their own classes."""

_OF_A_CLASS: Final = ("__", "_abc_")
"""Beginnings of the names of attributes that each class has for itself."""
_ANSWER: Final = "_gpp_answer"
"""The attribute of a module that answers its calls."""


@functools.cache
def _answering(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind` that differs only in that its calls are answered."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        answer = vars(self).get(_ANSWER)  # parts of a container, such as net[:2], are new modules of its class
        return kind.__call__(self, *args, **kwargs) if answer is None else answer(self, args, kwargs)

    def reduced(self: nn.Module, protocol: Any) -> Any:
        """Copies and pickles are of the user's class."""
        plain: tuple[Any, ...] = kind.__reduce_ex__(self, protocol)  # type: ignore[assignment]
        function, arguments, *rest = plain
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _ANSWER}
        made = (kind if each is type(self) else each for each in arguments)
        return object.__new__ if function is copyreg.__newobj__ else function, tuple(made), *rest  # type: ignore[attr-defined]

    about = {"__call__": call, "__reduce_ex__": reduced, "__module__": kind.__module__}
    answering: type[nn.Module] = _written_through(kind)(kind.__name__, (kind,), about)
    return answering


def _written_through(kind: type[nn.Module]) -> type:
    """The class of a subclass of `kind` whose attributes are set in `kind`, as by `type(self).scale = 2` in a hook."""
    meta = type(kind)

    def write(cls: type, name: str, value: Any) -> None:
        if name.startswith(_OF_A_CLASS):
            type.__setattr__(cls, name, value)
        else:
            setattr(kind, name, value)

    def remove(cls: type, name: str) -> None:
        delattr(kind, name)

    return type(meta.__name__, (meta,), {"__setattr__": write, "__delattr__": remove})


def attach(modules: Kinds, answer: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Answer calls of modules. Their own `__setattr__` would look for parameters, in every micro-batch."""
    for module, kind in modules:
        vars(module)[_ANSWER] = answer
        object.__setattr__(module, "__class__", _answering(kind))  # type: ignore[arg-type]


def detach(modules: Kinds) -> None:
    """Undo `attach`."""
    for module, kind in modules:
        object.__setattr__(module, "__class__", kind)
        vars(module).pop(_ANSWER, None)


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
        attach(self._modules, self._answer)

    def _detach(self) -> None:
        self._active = False
        detach(self._modules)


def answered(modules: Mapping[str, nn.Module], answer: CallHandler) -> AbstractContextManager[None]:
    """A context in which a call of one of the modules returns `answer(call number, module, args, kwargs)`."""
    numbers = itertools.count()
    return Answers(modules.values(), lambda module, args, kwargs: answer(next(numbers), module, args, kwargs)).given()
