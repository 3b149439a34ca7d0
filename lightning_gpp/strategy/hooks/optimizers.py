"""Hooks that see the optimizers and gradients of all ranks, though each rank has those of its stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import lightning.pytorch as pl

from lightning_gpp._compat.lightning import accumulates
from lightning_gpp.strategy.hooks.found import GRADIENTS, names_in, owners_of, user_hooks
from lightning_gpp.strategy.replaced import Replaced
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
                    self._replaced.put(owner, name, self._with_norms(plain))
        for found in user_hooks(self._trainer, _OTHERS):
            if "param_groups" in names_in(found, self._trainer):
                self._replaced.put(found.owner, found.name, self._undivided(found.plain))

    def detach(self) -> None:
        self._replaced.restore()

    def _with_norms(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        hook = self._undivided(plain)

        @functools.wraps(plain)
        def with_norms(*args: Any, **kwargs: Any) -> Any:
            norms = None if accumulates(self._trainer) else self._engine().known_norms()
            with nullcontext() if norms is None else known(norms):
                return hook(*args, **kwargs)

        return with_norms

    def _undivided(self, plain: Any) -> Callable[..., Any]:
        @functools.wraps(plain)
        def hook(*args: Any, **kwargs: Any) -> Any:
            with self._engine().undivided_optimizers():
                return plain(*args, **kwargs)

        return hook


def _plain_hooks(name: str) -> list[Any]:
    """The hooks of a name that do nothing."""
    return [getattr(base, name, None) for base in (pl.Callback, pl.LightningModule)]
