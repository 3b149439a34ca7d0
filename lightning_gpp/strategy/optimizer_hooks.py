"""Hooks that see the optimizers and gradients of all ranks, though each rank has those of its stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import lightning.pytorch as pl

from lightning_gpp._compat.lightning import accumulates
from lightning_gpp.strategy.replaced import Replaced
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.gradient_norms import known
from lightning_gpp.training.hook_code import names_in_hook
from lightning_gpp.user_code import user_function

GRADIENTS: Final = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
"""Hooks in which gradients are complete; there the norms of all are known."""

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
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        bases = {id(callback): (callback, pl.Callback) for callback in callbacks}
        module = self._trainer.lightning_module
        helpers = [*callbacks, *module.modules()]
        for owner, base in (*bases.values(), (module, pl.LightningModule)):
            for name in GRADIENTS:
                plain = getattr(owner, name, None)
                if plain is not None and getattr(plain, "__func__", None) is not getattr(base, name, None):
                    self._replaced.put(owner, name, self._with_norms(plain))
            for name in _OTHERS:
                plain = getattr(owner, name, None)
                if _reads_groups(plain, helpers):
                    self._replaced.put(owner, name, self._undivided(plain))

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


def _reads_groups(hook: Any, helpers: Sequence[object]) -> bool:
    function = user_function(hook)
    return function is not None and "param_groups" in names_in_hook(function, helpers)
