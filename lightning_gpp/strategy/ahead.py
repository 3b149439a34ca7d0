"""Mini-batches of a trainer that are read, and moved to the device, before their turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl

from lightning_gpp._compat import lightning as _compat
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.feed import Feed
from lightning_gpp.training.incoming import Incoming


class ReadAhead:
    """Reads a trainer's training data ahead, on the rank that runs the step.

    The hooks that move a mini-batch to the device run when it is read, once; all others at its turn.

    Attributes:
        delivering: whether the loop is about to move a mini-batch that is there already.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine, incoming: Incoming) -> None:
        self._trainer, self._engine, self._incoming = trainer, engine, incoming
        self._module: pl.LightningModule = trainer.lightning_module
        self._feed = Feed(lambda: engine.ahead, self._prepared, self._left)
        self._reading = False
        self.delivering = False

    def attach(self) -> None:
        """Take part in the loop, which has its data by now."""
        _compat.skip_step_broadcast(self._trainer)
        if not self._engine.runs_step:
            return
        self._incoming.upcoming = lambda: self._feed.upcoming
        _compat.deliver_prepared(self._module, lambda: self.delivering and not self._reading)
        _compat.read_ahead(self._trainer, self._over)

    def deliver(self) -> Any:
        """The mini-batch whose turn it is, on the device; all ranks are told of it."""
        self.delivering = False
        self._incoming.announce(self._feed.current)
        return self._feed.current

    def _over(self, loader: Any) -> Iterator[Any]:
        for entry in self._feed.over(loader):
            self.delivering = True
            yield entry

    def _prepared(self, entry: Any) -> Any:
        batch, *_ = entry
        self._reading = True
        try:
            return _compat.transferred(self._module, batch, self._engine.device)
        finally:
            self._reading = False

    def _left(self) -> int | None:
        """Mini-batches until `max_steps`; None where there is no such limit."""
        trainer = self._trainer
        if trainer.max_steps == -1:
            return None
        missing = trainer.max_steps - trainer.global_step
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches
        return missing * trainer.accumulate_grad_batches - done
