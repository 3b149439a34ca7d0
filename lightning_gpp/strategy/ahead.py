"""Reads a trainer's mini-batches, and moves them to the device, before their turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gpp._compat.lightning import loaders_of, read_ahead
from lightning_gpp.replaced import Replaced
from lightning_gpp.strategy.data import AgreedLoader, Taken, has_state, transferred
from lightning_gpp.training.data.batches import Feed
from lightning_gpp.training.data.incoming import Incoming


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A mini-batch from the loader, unprepared.

    `told`: facts about the loader for other ranks at its turn. `positions`: those of loaders after it, for checkpoints.
    """

    entry: Any
    told: list[bool]
    positions: list[tuple[AgreedLoader, dict[str, Any]]]

    @property
    def loader(self) -> int:
        """The number of the data loader."""
        _, _, number = self.entry
        return int(number)


class ReadAhead:
    """Reads a trainer's data ahead, on the rank that runs the step, in loops that may be nested.

    The hooks that move a mini-batch to the device run once, when it is read; all others run at its turn. Other ranks
    and checkpoints see loaders as if they were read only up to the current mini-batch.
    """

    def __init__(self, trainer: pl.Trainer, incoming: Incoming, device: torch.device) -> None:
        self._trainer, self._incoming, self._device = trainer, incoming, device
        self._replaced = Replaced()
        self._control = incoming.control
        self._around: list[Feed] = []
        self._silent: list[list[AgreedLoader]] = []
        """The loaders of each loop that tell the other ranks nothing while they are read ahead."""
        self._reading = False

    @property
    def active(self) -> bool:
        """True if the current loop gets its mini-batches from here."""
        return bool(self._around) and self._control.runs_step

    def attach(self) -> None:
        """Make the mini-batches of loops known, which skip hooks where there are no data, or that they went through."""
        for owner in (self._trainer.lightning_module, getattr(self._trainer, "datamodule", None)):
            if owner is not None:
                self._replaced.put(owner, "on_before_batch_transfer", self._taking(owner.on_before_batch_transfer))

    def detach(self) -> None:
        """Undo `attach`."""
        self._replaced.restore()

    def _taking(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def before(batch: Any, dataloader_idx: int = 0) -> Any:
            if self._reading:
                return plain(batch, dataloader_idx)
            return Taken(plain(batch, dataloader_idx) if self._control.loads and not self.active else None)

        return before

    def train(self, ahead: Callable[[], int]) -> None:
        """Take part in the loop of training, for the rest of the run."""
        self._begin(Feed(ahead, self._prepared, self._left))

    def evaluate(self, ahead: Callable[[], int]) -> None:
        """Take part in a loop of evaluation; mini-batches do not follow those of another loader."""
        self._begin(Feed(ahead, self._prepared, group=lambda read: read.loader))

    def end(self) -> None:
        """Leave the loop that ends, for the one around it. Its loaders tell the other ranks themselves again."""
        self._incoming.feed = self._around.pop()
        for loader in self._silent.pop():
            loader.tell = self._control.share_loaded

    def next(self) -> Any:
        """The mini-batch whose turn it is, on the device."""
        read, batch = self._incoming.feed.turn()
        for loader, position in read.positions:
            loader.position = position
        return batch

    def announce(self, batch: Any) -> bool:
        """Announce the mini-batch whose turn it is to all ranks; returns False if it is None."""
        feed = self._incoming.feed
        anew = self.active and feed.interrupted
        known = self._incoming.announce(batch, anew=anew)
        feed.interrupted = feed.interrupted and not anew
        return known

    def _begin(self, feed: Feed) -> None:
        """Read the data of the loop that runs, which has them by now."""
        self._around.append(self._incoming.feed)
        self._incoming.feed = feed
        self._silent.append([])
        if not self._control.runs_step:
            return
        loop, told = _current_loop(self._trainer), list[bool]()
        self._silent[-1] = [each for each in loaders_of(loop) if isinstance(each, AgreedLoader)]
        for loader in self._silent[-1]:
            loader.tell = told.append
        read_ahead(loop, partial(self._over, feed, told))

    def _over(self, feed: Feed, told: list[bool], loader: Iterable[Any]) -> Iterator[Any]:
        stateful = [each for each in self._silent[-1] if has_state(each)]

        def reads() -> Iterator[_Read]:
            for entry in loader:
                positions = [(each, each.loader.state_dict()) for each in stateful]
                yield _Read(entry=entry, told=[*told], positions=positions)
                told.clear()

        told.clear()
        for read in feed.over(reads()):
            self._share(read.told)
            yield read.entry
        self._share(told)

    def _share(self, told: list[bool]) -> None:
        for more in told:
            self._control.share_flag(more)

    def _prepared(self, read: _Read) -> Any:
        batch, *_ = read.entry
        self._reading = True
        try:
            return transferred(self._trainer, batch, self._device, read.loader)
        finally:
            self._reading = False

    def _left(self) -> int | None:
        """Number of mini-batches until `max_steps`; None without such a limit."""
        trainer = self._trainer
        if trainer.max_steps == -1:
            return None
        missing = trainer.max_steps - trainer.global_step
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches
        return missing * trainer.accumulate_grad_batches - done


def _current_loop(trainer: pl.Trainer) -> Any:
    function = trainer.state.fn
    if trainer.training:
        return trainer.fit_loop
    if function is None or function == TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop
    return getattr(trainer, f"{function.value}_loop")
