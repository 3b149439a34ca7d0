"""The parameters of a module, looked up in every step without a walk over all of its modules."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import nn
from torch.nn import Parameter


class ParameterWalk:
    """Returns a module's parameters, in the order of registration.

    It walks over the modules again only where one of them, or a parameter, was added, removed or replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[nn.Module] = [module]
        self._entries: list[Any] = []
        self._found: list[Parameter] = []

    def __call__(self) -> list[Parameter]:
        entries = self._registered()
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            self._parts, self._found = list(self._module.modules()), list(self._module.parameters())
            self._entries = self._registered()
        return self._found

    def _registered(self) -> list[Any]:
        """All entries of the modules known, in C: a few ns for each."""
        registries = chain(map(_MODULES, self._parts), map(_PARAMETERS, self._parts))
        return list(chain.from_iterable(map(_VALUES, registries)))


_MODULES, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")
_VALUES = methodcaller("values")  # scripted modules have registries that are no dicts
