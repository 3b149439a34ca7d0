"""Hooks around gradients see the optimizers of all ranks, and norms of all gradients, though each rank has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl

from lightning_gpp._compat.lightning import accumulates
from lightning_gpp.replaced import Replaced
from lightning_gpp.strategy.hooks.found import GRADIENTS, owners_of
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.updates.gradient_norms import known


class OptimizerHooks:
    """Replaces these hooks of module and callbacks; inside, optimizers have the parameters of all ranks.

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

    def detach(self) -> None:
        self._replaced.restore()

    @contextmanager
    def _with_norms(self) -> Iterator[None]:
        norms = None if accumulates(self._trainer) else self._engine().known_norms()
        with self._engine().undivided_optimizers(), nullcontext() if norms is None else known(norms):
            yield


def _plain_hooks(name: str) -> list[Any]:
    """The hooks of a name that do nothing."""
    return [getattr(base, name, None) for base in (pl.Callback, pl.LightningModule)]
