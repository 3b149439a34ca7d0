"""The parameters of a module, looked up in every step without a walk over all of its modules."""

from __future__ import annotations

from operator import is_

from torch import nn
from torch.nn import Parameter

from lightning_gpp._compat.torch import registered_in


class ParameterWalk:
    """Returns a module's parameters, in the order of registration.

    It walks over the modules again only where one of them, or a parameter, was added, removed or replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[nn.Module] = [module]
        self._entries: list[object] = []
        self._found: list[Parameter] = []

    def __call__(self) -> list[Parameter]:
        entries = registered_in(self._parts)
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            self._parts, self._found = list(self._module.modules()), list(self._module.parameters())
            self._entries = registered_in(self._parts)
        return self._found
