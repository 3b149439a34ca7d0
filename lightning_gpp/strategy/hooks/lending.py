"""Hooks of module and callbacks outside of mini-batches, which may call the network on every rank, and read weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import lightning.pytorch as pl

from lightning_gpp.replaced import Around, Replaced
from lightning_gpp.strategy.hooks.found import LOOPS, UserHook, names_in, user_hooks
from lightning_gpp.training.lending import Lending

_HOOKS: Final = (
    *(f"on_{loop}_{moment}" for loop in LOOPS for moment in ("start", "end", "epoch_start", "epoch_end")),
    "on_save_checkpoint",
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
        for found in user_hooks(self._trainer, _HOOKS):
            self._replaced.surround(found.owner, found.name, self._lent(found))

    def detach(self) -> None:
        self._replaced.restore()

    def _lent(self, found: UserHook) -> Around:
        named = names_in(found, self._trainer)

        def around() -> AbstractContextManager[None]:
            lending = self._lending()
            return nullcontext() if lending is None else lending.in_hook(named)

        return around
