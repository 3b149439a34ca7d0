"""ModelPruning in stages: its own code runs on every rank, on the module in torch's form (`training/pruning.py`).

apply_pruning                      with the values of all ranks, and the random numbers of the first one
apply_lottery_ticket_hypothesis    every rank puts back what it holds
make_pruning_permanent             and so here
on_save_checkpoint                 reads the state dict of torch's form
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning
from torch import nn

from lightning_gpp._compat.lightning import original_layers, parameters_to_prune
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.host import Job
from lightning_gpp.training.mirror import Mirror
from lightning_gpp.training.option_values import SYNCHRONOUS

Around = Callable[[ModelPruning], AbstractContextManager[None]]


class SharedPruning:
    """Replaces methods of the callbacks that prune; `detach` puts them back.

    Args:
        trainer: of the run.
        engine: returns the engine that trains.
    """

    def __init__(self, trainer: pl.Trainer, engine: Callable[[], Engine]) -> None:
        self._trainer, self._engine = trainer, engine
        self._around: dict[str, Around] = {
            "apply_pruning": lambda callback: self._engine().pruning.gathered(parameters_to_prune(callback)),
            "apply_lottery_ticket_hypothesis": self._put_back,
            "make_pruning_permanent": lambda _: self._engine().pruning.shown(),
            "on_save_checkpoint": lambda _: self._engine().pruning.shown(),
            "on_train_epoch_end": self._one_stream,
            "on_validation_epoch_end": self._one_stream,
        }

    def attach(self) -> None:
        for callback in pruning_callbacks(self._trainer):
            self._engine().pruning.hide()
            for name, around in self._around.items():
                vars(callback)[name] = _inside(getattr(callback, name), callback, around)

    def detach(self) -> None:
        for callback in pruning_callbacks(self._trainer):
            for name in self._around:
                vars(callback).pop(name, None)

    @contextmanager
    def _put_back(self, callback: ModelPruning) -> Iterator[None]:
        """Ranks that were not seeded alike have other values of before training, or draw others anew."""
        pruning = self._engine().pruning
        with pruning.shown():
            yield
            pruning.agree(parameters_to_prune(callback))

    def _one_stream(self, _: ModelPruning) -> AbstractContextManager[None]:
        engine = self._engine()
        return Mirror(engine.control, engine.device).one_stream()


def _inside(plain: Callable[..., Any], callback: ModelPruning, around: Around) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        with around(callback):
            return plain(*args, **kwargs)

    return method


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
        for problem in (*_unsuited(job, plan), *_tied(job.module, callback), *_empty(callback)):
            raise ConfigError(f"The callback {type(callback).__name__} {problem} (trainer.callbacks).")


def _unsuited(job: Job, plan: Plan) -> Iterator[str]:
    options = job.options
    if options.weights != SYNCHRONOUS:
        yield f"masks one version of the weights, but strategy.weights={options.weights} keeps several. Leave it out"
    if plan.sharding == "fsdp":
        yield "ranks undivided parameters, but strategy.sharding=fsdp divides them. Use zero1, or leave it out"
    if options.num_members > 1:
        yield (
            f"ranks undivided parameters, but strategy.tensor_parallel_size={options.tensor_parallel_size} divides "
            "them. Leave it out"
        )
    if job.whole:
        yield (
            "masks weights between the steps of optimizers, but a step as a whole (strategy.step=whole, manual "
            "optimization) may step them between two forwards. Use automatic optimization and "
            "strategy.step=micro_batches, or train on one process"
        )


def _tied(module: nn.Module, callback: ModelPruning) -> Iterator[str]:
    owners = Counter(id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False))
    for part, name in parameters_to_prune(callback):
        if owners[id(getattr(part, name))] > 1:
            yield (
                f"would give {name!r} of {part} a mask, but another module has the same parameter, which torch prunes "
                "apart. Leave it out of parameters_to_prune (or filter_parameters_to_prune)"
            )


def _empty(callback: ModelPruning) -> Iterator[str]:
    layers = original_layers(callback)
    if any(tensor.is_meta for layer in layers for tensor in (*layer.parameters(), *layer.buffers())):
        yield (
            "puts back the values of before training (use_lottery_ticket_hypothesis), but the module was built without "
            "memory. Build it on the CPU, or set use_lottery_ticket_hypothesis=False"
        )
