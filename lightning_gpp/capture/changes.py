"""Changes with which a refused recording goes on: modules that are called whole, forwards that belong to the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from lightning_gpp.errors import CaptureError

T = TypeVar("T")


def attempted(
    module: nn.Module, attempt: Callable[[Changes], T], opens: bool = True, uncut: Mapping[str, str] = {}
) -> T:
    """The result of `attempt(changes)`, with changes for what cannot be recorded. `opens`, `uncut`: see `Changes`."""
    changes = Changes(opens, dict(uncut))
    while True:
        try:
            return attempt(changes)
        except CaptureError as error:
            if not changes.answer(error, module):
                raise (changes.opened_for[0] if changes.opened_for else error) from error.__cause__


@dataclass(slots=True)
class Changes:
    """Parts that are recorded in another way, because they were refused.

    Args:
        opens: whether forwards may run as parts of the step.
        uncut: reasons why modules are called whole and never cut, by path.
        opened: reasons why the forwards of modules run as parts of the step, by path.
        refuted: numbers of truth values, read by the step, that are false; it cannot go on with others.
    """

    opens: bool = True
    uncut: dict[str, str] = field(default_factory=dict)
    opened: dict[str, str] = field(default_factory=dict)
    refuted: set[int] = field(default_factory=set)
    opened_for: list[CaptureError] = field(default_factory=list)
    """The refusals that modules were opened for; the user's reason if that does not help."""
    compared: bool = False
    """True if recordings were compared before."""

    def answer(self, error: CaptureError, module: nn.Module) -> bool:
        """Note what to do about a refusal; false if nothing can be done."""
        path = next((path for path in error.modules if path not in self.uncut), None)
        if error.refuted is not None:
            self.refuted.add(error.refuted)
        elif path is None and self._opens_criterion(error, module):
            self.opened[error.modules[-1]] = self.uncut.pop(error.modules[-1])
        elif path is None or (_holds_all(module, path) and not self.opens):
            return False
        elif _holds_all(module, path):
            self.refuted.clear()
            self.opened_for.append(error)
            self.opened.update(dict.fromkeys(error.modules[error.modules.index(path) :], error.reason))
        else:
            for inner in [inner for inner in self.uncut if inner.startswith(f"{path}.")]:
                del self.uncut[inner]
            self.uncut[path] = error.reason
        return True

    def _opens_criterion(self, error: CaptureError, module: nn.Module) -> bool:
        """True if the step calls a module with buffers alone, such as a loss with weights of classes, in vain."""
        if not (error.modules and self.opens) or error.modules[-1] not in self.uncut:
            return False
        return next(module.get_submodule(error.modules[-1]).parameters(), None) is None


def _holds_all(module: nn.Module, path: str) -> bool:
    """True if a submodule has all parameters: what is in one piece needs no pipeline."""
    return len({*module.parameters()} - {*module.get_submodule(path).parameters()}) == 0
