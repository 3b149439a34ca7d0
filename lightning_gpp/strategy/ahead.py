"""Mini-batches of a trainer that are read, and moved to the device, before their turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_gpp._compat import lightning as _compat
from lightning_gpp.strategy.data import AgreedLoader
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.feed import Feed
from lightning_gpp.training.incoming import Incoming


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A mini-batch as the loader gave it.

    `told`: what other ranks are to know of the loader at its turn; `states`: of stateful loaders after it was read.
    """

    entry: Any
    told: list[bool]
    states: list[dict[str, Any]]


class ReadAhead:
    """Reads a trainer's training data ahead, on the rank that runs the step.

    The hooks that move a mini-batch to the device run when it is read, once; all others at its turn. To the other ranks
    and to checkpoints it looks as if loaders were read no further than the current mini-batch.

    Attributes:
        delivering: whether the loop is about to move a mini-batch that is there already.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine, incoming: Incoming) -> None:
        self._trainer, self._engine, self._incoming = trainer, engine, incoming
        self._module: pl.LightningModule = trainer.lightning_module
        self._feed = Feed(lambda: engine.ahead, self._prepared, self._left)
        self._told: list[bool] = []
        self._reading = False
        self.delivering = False

    def attach(self) -> None:
        """Take part in the loop, which has its data by now."""
        _compat.skip_step_broadcast(self._trainer)
        if not self._engine.runs_step:
            return
        self._incoming.upcoming = lambda: [batch for _, batch in self._feed.upcoming]
        _compat.deliver_prepared(self._module, lambda: self.delivering and not self._reading)
        for loader in _compat.training_loaders(self._trainer):
            if isinstance(loader, AgreedLoader):
                loader.tell = self._told.append
        _compat.read_ahead(self._trainer, self._over)

    def deliver(self) -> Any:
        """The mini-batch whose turn it is, on the device; all ranks are told of it."""
        self.delivering = False
        read, batch = self._feed.turn()
        _compat.report_loader_states(self._trainer, read.states)
        self._incoming.announce(batch, anew=self._feed.interrupted)
        self._feed.interrupted = False
        return batch

    def _over(self, loader: Iterable[Any]) -> Iterator[Any]:
        self._told.clear()
        for read in self._feed.over(self._read(loader)):
            self._share(read.told)
            self.delivering = True
            yield read.entry
        self._share(self._told)

    def _read(self, loader: Iterable[Any]) -> Iterator[_Read]:
        for entry in loader:
            yield _Read(entry=entry, told=[*self._told], states=_compat.loader_states(self._trainer))
            self._told.clear()

    def _share(self, told: list[bool]) -> None:
        for more in told:
            self._engine.control.share_flag(more)

    def _prepared(self, read: _Read) -> tuple[_Read, Any]:
        batch, *_ = read.entry
        self._reading = True
        try:
            return read, _compat.transferred(self._module, batch, self._engine.device)
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
