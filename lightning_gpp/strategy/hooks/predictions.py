"""Callbacks that take predictions run where these are, so that nothing is written twice."""

from __future__ import annotations

import functools
from typing import Any, Final

import lightning.pytorch as pl

from lightning_gpp.replaced import Replaced
from lightning_gpp.strategy.hooks.found import owners_of
from lightning_gpp.training.control import Control

_HOOKS: Final = (
    *(f"on_predict_{each}" for each in ("batch_start", "batch_end", "epoch_end", "end")),
    *("write_on_batch_end", "write_on_epoch_end"),
)


class PredictionHooks:
    """Leaves out the callbacks' hooks of prediction on ranks that have no predictions."""

    def __init__(self, trainer: pl.Trainer, control: Control) -> None:
        self._trainer, self._control, self._replaced = trainer, control, Replaced()

    def attach(self) -> None:
        if not self._control.loads:
            *callbacks, _ = owners_of(self._trainer)
            for callback in callbacks:
                for name in _HOOKS:
                    if hasattr(callback, name):
                        self._replaced.put(callback, name, _silent(getattr(callback, name)))

    def detach(self) -> None:
        self._replaced.restore()


def _silent(hook: Any) -> Any:
    """It is still taken for the hook itself: these ranks lend the values of the network that it calls elsewhere."""

    @functools.wraps(getattr(hook, "__func__", hook))
    def nothing(*_: Any, **__: Any) -> None:
        pass

    return nothing
