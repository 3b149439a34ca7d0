"""ModelPruning in stages: its own code runs on every rank, on the module in torch's form (`training/pruning.py`).

Masks are found with the values of all ranks, and with the random numbers of the first one, so they are the same on all.
What follows from masks, every rank does to the parameters that it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning
from torch import nn

from lightning_gpp._compat.lightning import original_layers, parameters_to_prune
from lightning_gpp._compat.torch_pruning import pruning_hooks
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.replaced import Around, Replaced
from lightning_gpp.strategy.hooks.found import owners_of
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.host import Job
from lightning_gpp.training.mirror import Mirror
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.pruning import Pruning

HOOKS: Final = "on_train_epoch_end", "on_validation_epoch_end", "on_train_end"
"""Hooks in which module and callbacks see the module in torch's form: they may read masks, and count zeros."""


class SharedPruning:
    """Replaces methods of the callbacks that prune, and hooks that see what they do; `detach` puts them back.

    Args:
        trainer: of the run.
        engine: returns the engine that trains.
    """

    def __init__(self, trainer: pl.Trainer, engine: Callable[[], Engine]) -> None:
        self._trainer, self._engine = trainer, engine
        self._replaced = Replaced()

    def attach(self) -> None:
        """Bring the module into the form in which stages can train it, if there are callbacks that prune."""
        for callback in pruning_callbacks(self._trainer):
            self._pruning.hide()
            self._pruning.fill(original_layers(callback))
            for name, around in self._methods(callback).items():
                self._replaced.surround(callback, name, around)
        for owner in owners_of(self._trainer) if self._replaced else ():
            for name in HOOKS:
                self._replaced.surround(owner, name, self._pruning.shown)

    def detach(self) -> None:
        self._replaced.restore()

    @property
    def _pruning(self) -> Pruning:
        return self._engine().pruning

    def _methods(self, callback: ModelPruning) -> dict[str, Around]:
        engine, found = self._engine(), partial(parameters_to_prune, callback)
        one_stream = Mirror(engine.control, engine.device).one_stream
        return {
            "on_train_epoch_end": one_stream,
            "on_validation_epoch_end": one_stream,
            "apply_pruning": lambda: self._pruning.gathered(found()),
            "apply_lottery_ticket_hypothesis": lambda: self._pruning.agreeing(found()),
            "make_pruning_permanent": self._pruning.shown,
            "on_save_checkpoint": self._pruning.shown,
        }


def pruning_callbacks(trainer: pl.Trainer) -> list[ModelPruning]:
    """The callbacks of a trainer that prune."""
    return [callback for callback in getattr(trainer, "callbacks", ()) if isinstance(callback, ModelPruning)]


def check_pruning(callbacks: Sequence[ModelPruning], job: Job, plan: Plan) -> None:
    """Raise ConfigError if stages cannot train what is to be pruned, or not with these options.

    Args:
        callbacks: those that prune.
        job: the job of the run, before parameters are placed.
        plan: the plan of the run.
    """
    for callback in callbacks:
        for problem in (*_unsuited(job, plan), *_pruned_before(job.module), *_tied(job.module, callback)):
            raise ConfigError(f"The callback {type(callback).__name__} {problem} (trainer.callbacks).")


def _unsuited(job: Job, plan: Plan) -> Iterator[str]:
    options = job.options
    if options.weights != SYNCHRONOUS:
        yield f"masks one version of the weights, but strategy.weights={options.weights} keeps several. Leave it out"
    if plan.sharding == "fsdp":
        yield "ranks undivided parameters, but strategy.sharding=fsdp divides them. Use zero1, or leave it out"
    if options.degrees != (1,):
        yield f"ranks undivided parameters, but tensor_parallel_size={max(options.degrees)} divides them. Leave it out"
    if job.whole:
        yield (
            "masks weights between the steps of optimizers, but a step as a whole (strategy.step=whole, manual "
            "optimization) may step them between two forwards. Use automatic optimization and "
            "strategy.step=micro_batches, or train on one process"
        )


def _pruned_before(module: nn.Module) -> Iterator[str]:
    for path, part in module.named_modules():
        for name in pruning_hooks(part):
            yield (
                f"prunes stages, which know parameters by name, but {f'{path}.{name}'.removeprefix('.')!r} is pruned "
                "already, and so has another name. Call torch.nn.utils.prune.remove before trainer.fit, or let "
                "make_pruning_permanent=True do so at the end of a run"
            )


def _tied(module: nn.Module, callback: ModelPruning) -> Iterator[str]:
    owners = Counter(id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False))
    for part, name in parameters_to_prune(callback):
        if owners[id(getattr(part, name))] > 1:
            yield (
                f"would give {name!r} of {part} a mask, but another module has the same parameter, which torch prunes "
                "apart. Leave it out of parameters_to_prune (or filter_parameters_to_prune)"
            )
