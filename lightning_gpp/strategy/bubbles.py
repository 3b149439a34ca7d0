"""Callbacks that give a pipeline work for its bubbles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.errors import ConfigError
from lightning_gpp.reports.units import percent
from lightning_gpp.strategy.strategy import GPPStrategy
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.tensors.gathered import summon_full_params


class FillBubbles(pl.Callback):
    """Runs small pieces of other work while a rank waits for messages of the pipeline (PipeFill, arXiv 2410.07192).

        def embeddings(module):
            for texts in islice(corpus, module.global_rank, None, module.trainer.world_size):
                yield store(embedder(texts))

        Trainer(strategy=GPPStrategy(), callbacks=[FillBubbles(embeddings)])

    Every rank takes items from an iterable of its own; it computes a piece with each, without gradients, and leaves no
    context open in between. Pieces should be many times shorter than the waits. They need memory beside the stages.

    Args:
        pieces: makes the iterable of this rank, from the module.
    """

    def __init__(self, pieces: Callable[[pl.LightningModule], Iterable[object]]) -> None:
        self._pieces = pieces

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        engine = _engine_of(trainer)
        engine.job.bubbles.fill(self._pieces(pl_module), engine.device)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        engine = _engine_of(trainer)
        bubbles, control = engine.job.bubbles, engine.control
        bubbles.end()
        found = control.gather((bubbles.number, bubbles.waited, bubbles.used, bubbles.late))
        if control.rank == 0:
            engine.job.host.inform(_report(found))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, GPPStrategy) and strategy.engine is not None:
            strategy.engine.job.bubbles.end()


class ValidateInBubbles(FillBubbles):
    """Validates a copy of the model while the next epoch trains, one mini-batch in each piece.

    The copy has the weights from the beginning of an epoch. Ranks share the mini-batches; what is left at the end of
    the epoch is computed then. The means of all numbers that `validation_step` logs appear at the end of the epoch
    under `before_epoch/`. It needs the memory of the model on each rank.

    Args:
        loader: mini-batches, the same on all ranks.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._logged = defaultdict[str, list[float]](list)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _engine_of(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        engine = _engine_of(trainer)
        with summon_full_params(pl_module):
            frozen = cast(pl.LightningModule, private_copy(pl_module).eval())
        vars(frozen).update(log=self._log, log_dict=self._log_dict)
        engine.job.bubbles.fill(self._steps(frozen, engine), engine.device)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        engine = _engine_of(trainer)
        engine.job.bubbles.rest()
        logged = defaultdict[str, list[float]](list)
        for found in engine.control.gather(dict(self._logged)):
            for name, values in found.items():
                logged[name] += values
        self._logged.clear()
        pl_module.log_dict({f"before_epoch/{name}": sum(each) / len(each) for name, each in logged.items()})

    def _steps(self, frozen: pl.LightningModule, engine: Engine) -> Iterator[None]:
        control = engine.control
        for number, batch in enumerate(islice(self._loader, control.rank, None, control.world_size)):
            with engine.job.host.context("validation_step")():
                frozen.validation_step(move_data_to_device(batch, engine.device), number)
            yield

    def _log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        if not isinstance(value, int | float | torch.Tensor):
            raise ConfigError(
                f"ValidateInBubbles averages numbers, and validation_step logs {name!r}, a {type(value).__name__}. Log "
                "a number there, or validate by the Trainer."
            )
        self._logged[name].append(float(value))

    def _log_dict(self, values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in values.items():
            self._log(name, value)


def _engine_of(trainer: pl.Trainer) -> Engine:
    strategy = trainer.strategy
    engine = strategy.engine if isinstance(strategy, GPPStrategy) else None
    if engine is None or engine.control.num_devices == 1:
        raise ConfigError(
            "Only pipelines of two or more devices have bubbles. Leave FillBubbles and ValidateInBubbles out of "
            "Trainer(callbacks=...)."
        )
    return engine


def _report(found: Iterable[tuple[int, float, float, float]]) -> str:
    """The share of the waits that was used, over all ranks, and the delay of the rank that was delayed most."""
    numbers, waits, uses, late = zip(*found, strict=True)
    number, waited, used = sum(numbers), sum(waits), sum(uses)
    return (
        f"Bubbles: {number} pieces in {used:.1f} of the {waited:.1f} s in which ranks waited for messages "
        f"({percent(used / max(waited, 1e-9))}); one rank was {max(late):.2f} s late, the others less."
    )
