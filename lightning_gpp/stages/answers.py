"""Answers to the user's calls of modules over a whole mini-batch, in which some calls are real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_gpp.stages.answered import attach, detach


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
