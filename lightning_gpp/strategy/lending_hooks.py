"""Hooks of module and callbacks outside of mini-batches, which may call the network on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any, Final

import lightning.pytorch as pl

from lightning_gpp.strategy.hooks import NAMES as SHARED
from lightning_gpp.strategy.replaced import Replaced
from lightning_gpp.training.hook_code import names_in_hook
from lightning_gpp.training.lending import Lending
from lightning_gpp.user_code import user_function

_LOOPS: Final = ("train", "validation", "test", "predict")
_HOOKS: Final = tuple(
    f"on_{loop}_{moment}" for loop in _LOOPS for moment in ("start", "end", "epoch_start", "epoch_end")
)


class LendingHooks:
    """Replaces such hooks that users have written; inside, ranks lend each other the values of modules that are called.

    Args:
        trainer: of the run.
        lending: returns what lends; None before the module is divided, or where its values cannot be lent.
    """

    def __init__(self, trainer: pl.Trainer, lending: Callable[[], Lending | None]) -> None:
        self._trainer, self._lending = trainer, lending
        self._replaced = Replaced()

    def attach(self) -> None:
        for owner in self._owners:
            for name in _HOOKS:
                plain = getattr(owner, name, None)
                if (function := user_function(plain)) is not None:
                    shared = owner is self._trainer.lightning_module and name in SHARED
                    self._replaced.put(owner, name, self._lent(plain, function, shared))

    def detach(self) -> None:
        self._replaced.restore()

    @property
    def _owners(self) -> list[object]:
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        return [*{id(callback): callback for callback in callbacks}.values(), self._trainer.lightning_module]

    def _lent(self, plain: Any, function: FunctionType, shared: bool) -> Callable[..., Any]:
        named = names_in_hook(function, [*self._owners, *self._trainer.lightning_module.modules()])

        @functools.wraps(plain)
        def hook(*args: Any, **kwargs: Any) -> Any:
            lending = self._lending()
            with nullcontext() if lending is None else lending.in_hook(named, shared=shared):
                return plain(*args, **kwargs)

        return hook
