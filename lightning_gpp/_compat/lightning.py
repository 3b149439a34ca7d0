"""Private names of Lightning and torchmetrics. Lightning is imported inside the functions, so that importing this
module does not load it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from lightning_gpp._compat.torch import pytree
from lightning_gpp.replaced import Replaced


def read_ahead(loop: Any, over: Callable[[Any], Iterator[Any]]) -> None:
    """Make a loop iterate over `over(loader)` instead of its combined loader.

    The loop's first iterator continues: a new one would draw random numbers, and restart loaders that a checkpoint
    resumed. From a loader without a length, the loop has also fetched a mini-batch by now.
    """
    fetcher = loop._data_fetcher
    fetched = getattr(fetcher, "batches", [])
    fetcher.iterator = over(itertools.chain(fetched, _rest_of(fetcher.iterator)))
    if fetched:
        fetcher.batches = list(itertools.islice(fetcher.iterator, len(fetched)))
    fetcher.setup(_AheadOf(fetcher.combined_loader, over))


def _rest_of(iterator: Any) -> Iterator[Any]:
    """Yield the rest of an iterator; combined loaders would restart if asked for an iterator."""
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return


def loaders_of(loop: Any) -> list[Any]:
    """The loaders of a loop that has its data."""
    return list(loop._data_fetcher.combined_loader.flattened)


class _AheadOf:
    """A combined loader with another iterator."""

    def __init__(self, loader: Any, over: Callable[[Any], Iterator[Any]]) -> None:
        self._loader, self._over = loader, over

    def __iter__(self) -> Iterator[Any]:
        return self._over(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def attach_data(trainer: Any, module: Any, datamodule: Any) -> None:
    """Make module, data and trainer known to each other as `trainer.fit` does, so that their hooks can be called."""
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, datamodule=datamodule)


def on_epoch_end_reached(trainer: Any, function: Callable[[], None], replaced: Replaced) -> None:
    """Call `function` before Lightning computes the values of an epoch.

    In evaluation this happens before any hook, so a callback would be too late.
    """
    connector = trainer._logger_connector
    plain = type(connector).epoch_end_reached

    def epoch_end_reached() -> None:
        function()
        plain(connector)

    replaced.put(connector, "epoch_end_reached", epoch_end_reached)


def leave_signals_alone(trainer: Any, replaced: Replaced) -> None:
    """Keep Lightning from handling signals: its handlers wait for other ranks, which wait elsewhere."""
    replaced.put(trainer._signal_connector, "register_signal_handlers", _do_nothing)


def _do_nothing() -> None:
    """Replaces what would wait for other ranks."""


def around_steps(
    trainer: Any,
    replaced: Replaced,
    *,
    before: Callable[[], None],
    after: Callable[[], None],
    rested: Callable[[], None],
) -> None:
    """Call `before` and `after` each training step: before its mini-batch is fetched, and after its last hook.

    `rested` is called after each validation and each epoch of training. These are the moments at which Lightning looks
    whether it should stop. `before` takes the place of the broadcast by which Lightning shares SIGTERM. It is left out
    at the first step after a checkpoint was restored: until then the loops' counters are those of the checkpoint.
    """
    fit = trainer.fit_loop
    loop = fit.epoch_loop

    def advance(data_fetcher: Any) -> None:
        if not loop.restarting:
            before()
        type(loop).advance(loop, data_fetcher)
        after()

    replaced.put(loop, "_broadcast_sigterm_tensor", _do_nothing)
    replaced.put(loop, "advance", advance)
    for owner, name in ((loop.val_loop, "run"), (fit, "on_advance_end")):
        replaced.put(owner, name, _followed(owner, name, rested))


def _followed(loop: Any, name: str, function: Callable[[], None]) -> Callable[[], Any]:
    def run() -> Any:
        result = getattr(type(loop), name)(loop)
        function()
        return result

    return run


@contextmanager
def counters_to_resume_from(trainer: Any) -> Iterator[None]:
    """Set the counters of a validation that runs, for a checkpoint, so that it begins anew: half of its values would be
    missing.
    """
    validation = trainer.fit_loop.epoch_loop.val_loop
    before = copy.deepcopy(validation.batch_progress)
    if trainer.validating:
        validation.batch_progress.reset()
        validation.batch_progress.increment_ready()
        validation.batch_progress.increment_started()
    try:
        yield
    finally:
        validation.batch_progress = before


def begin_validation_anew(trainer: Any) -> None:
    """Forget a validation that a checkpoint interrupted; the loop runs it now."""
    validation = trainer.fit_loop.epoch_loop.val_loop
    if validation.restarted_mid_evaluation:
        validation.batch_progress.reset()


FORWARD_CACHE: Final = "_forward_cache"
"""The attribute of a torchmetrics object that has the value of its last batch."""


def first_training_batch(
    trainer: Any,
    peek: Callable[[Any], Any] | None,
    is_moved: Callable[[Any], bool] = lambda loader: False,
    resumed: Mapping[str, Any] | None = None,
) -> Any:
    """Set up the training data loaders now instead of when the loop starts; returns the first mini-batch.

    Args:
        trainer: the trainer.
        peek: returns the first batch of a loader, and None if there is none; None if the mini-batch is not wanted.
        is_moved: whether reading moves a loader. Then the mini-batch is taken from the loop, which gets it, too, as it
            is from loaders of unknown length, from which the loop has fetched it. The same on all ranks.
        resumed: the loop's state in a checkpoint, which Lightning restores later: loaders are made for its epoch, and
            go on at its position.

    Returns:
        None if there is no training data, or no `peek`.
    """
    loop = trainer.fit_loop
    if resumed:
        loop.load_state_dict(resumed)
    loop.setup_data()
    if trainer.train_dataloader is None:
        return None
    loaders, form = pytree.tree_flatten(trainer.train_dataloader)
    moved = any(map(is_moved, loaders))
    fetched = _first_fetched(loop._data_fetcher, moved)
    if peek is None or not loaders:
        return None
    if moved or loop._data_fetcher.length is None:
        clone = partial(pytree.tree_map_only, torch.Tensor, torch.Tensor.clone)  # hooks may change it in place
        return clone(fetched[0][0]) if fetched else None
    peeked = [peek(loader) for loader in loaders]
    return None if any(batch is None for batch in peeked) else pytree.tree_unflatten(peeked, form)


def _first_fetched(fetcher: Any, moved: bool) -> list[Any]:
    """The first mini-batch that a loop has fetched, or, for loaders that are `moved` by reading, fetches now."""
    if fetcher.length is None or not moved:
        return list(getattr(fetcher, "batches", []))
    first = list(itertools.islice(_rest_of(fetcher.iterator), 1))
    fetcher.iterator = itertools.chain(first, _rest_of(fetcher.iterator))
    return first
