"""Hooks outside of mini-batches draw the same random numbers on every rank: those of global rank 0.

So ranks take the same decisions, and what is drawn for parameters of other ranks is drawn here, too, and thrown away.
"""

from __future__ import annotations

from typing import Final

import lightning.pytorch as pl

from lightning_gpp.replaced import Around, Replaced
from lightning_gpp.strategy.hooks.found import LOOPS, user_hooks

_HOOKS: Final = (
    *("on_fit_start", "on_fit_end"),
    *(f"on_{loop}_{moment}" for loop in LOOPS for moment in ("start", "end", "epoch_start", "epoch_end")),
)


class RandomHooks:
    """Replaces those that users have written, of module and callbacks.

    Args:
        trainer: of the run.
        one_stream: makes a context in which all processes draw the numbers of the first one; they enter it together.
    """

    def __init__(self, trainer: pl.Trainer, one_stream: Around) -> None:
        self._trainer, self._one_stream = trainer, one_stream
        self._replaced = Replaced()

    def attach(self) -> None:
        for found in user_hooks(self._trainer, _HOOKS):
            self._replaced.surround(found.owner, found.name, self._one_stream)

    def detach(self) -> None:
        self._replaced.restore()
