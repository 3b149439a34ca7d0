"""Warns of global variables that change during training: forwards that are cut keep the values of their capture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_gpp.capture.attributes import LIBRARIES, SCALARS


class GlobalValues:
    """The numbers, flags and texts in global variables of the files that the classes of a module are in.

    Args:
        module: the user's module.
        warn: warns the user.
    """

    def __init__(self, module: nn.Module, warn: Callable[[str], None]) -> None:
        self._warn, self._known = warn, list(_values(module))

    def check(self) -> None:
        """Warn of the first one that has another value than at the beginning, once."""
        for variables, name, value in self._known:
            now = variables.get(name)
            if now is not value and now != value:
                self._known = []
                self._warn(
                    f"The global variable {name} of {variables['__name__']} changed during training. Modules that are "
                    "cut into stages go on with the value of their capture, if they read it: keep it in an attribute "
                    "of the module."
                )
                return


def _values(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for file in sorted({type(part).__module__ for part in module.modules()}):
        if file.partition(".")[0] not in LIBRARIES and file in sys.modules:
            variables = vars(sys.modules[file])
            found = ((name, value) for name, value in variables.items() if type(value) in SCALARS and name[:2] != "__")
            yield from ((variables, name, value) for name, value in found)
