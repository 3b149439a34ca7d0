"""Hooks that change a checkpoint run on every rank, and what they read is whole on the rank that writes it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import lightning.pytorch as pl

from lightning_gpp.errors import ForeignTensorError
from lightning_gpp.replaced import Replaced
from lightning_gpp.strategy.hooks.found import user_hooks


class SavingHooks:
    """Lets `on_save_checkpoint` end early on ranks whose checkpoint is thrown away, if it reads values of others."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, self._replaced = trainer, Replaced()

    def attach(self) -> None:
        """Replace the hooks on all ranks but global rank 0."""
        if not self._trainer.is_global_zero:
            for found in user_hooks(self._trainer, ["on_save_checkpoint"]):
                self._replaced.surround(found.owner, found.name, partial(suppress, ForeignTensorError))

    def detach(self) -> None:
        self._replaced.restore()
