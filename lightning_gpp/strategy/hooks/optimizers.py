"""Hooks that see the optimizers and gradients of all ranks, though each rank has those of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import lightning.pytorch as pl

from lightning_gpp._compat.lightning import accumulates
from lightning_gpp.replaced import Replaced
from lightning_gpp.strategy.hooks.found import GRADIENTS, names_in, owners_of, user_hooks
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.gradient_norms import known

_OTHERS: Final = (
    "on_before_zero_grad",
    *(f"on_train_{moment}" for moment in ("start", "end", "batch_start", "batch_end", "epoch_start", "epoch_end")),
    *(f"on_validation_{moment}" for moment in ("start", "end", "epoch_start", "epoch_end")),
)
"""Hooks in which code may look at the groups of an optimizer."""


class OptimizerHooks:
    """Replaces such hooks of module and callbacks; inside, optimizers have the parameters of all ranks.

    Args:
        trainer: of the run.
        engine: returns the engine that trains.
    """

    def __init__(self, trainer: pl.Trainer, engine: Callable[[], Engine]) -> None:
        self._trainer, self._engine = trainer, engine
        self._replaced = Replaced()

    def attach(self) -> None:
        for owner in owners_of(self._trainer):
            for name in GRADIENTS:  # of libraries, too
                plain = getattr(owner, name, None)
                if plain is not None and getattr(plain, "__func__", None) not in _plain_hooks(name):
                    self._replaced.surround(owner, name, self._with_norms)
        for found in user_hooks(self._trainer, _OTHERS):
            if "param_groups" in names_in(found, self._trainer):
                self._replaced.surround(found.owner, found.name, self._undivided)

    def detach(self) -> None:
        self._replaced.restore()

    @contextmanager
    def _with_norms(self) -> Iterator[None]:
        norms = None if accumulates(self._trainer) else self._engine().known_norms()
        with self._undivided(), nullcontext() if norms is None else known(norms):
            yield

    def _undivided(self) -> AbstractContextManager[None]:
        return self._engine().undivided_optimizers()


def _plain_hooks(name: str) -> list[Any]:
    """The hooks of a name that do nothing."""
    return [getattr(base, name, None) for base in (pl.Callback, pl.LightningModule)]
