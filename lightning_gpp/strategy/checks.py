"""Checks before training starts: refuse settings that cannot work in stages, with the reason and a remedy."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_gpp._compat.torch import BatchNorm
from lightning_gpp.errors import ConfigError
from lightning_gpp.training.options import Options
from lightning_gpp.training.sessions import STEPS, compiled_steps
from lightning_gpp.training.tensors.joining import text_of
from lightning_gpp.wording import some

_SETTINGS = (
    "precision",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "overfit_batches",
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
)
"""Settings of the trainer by which ranks decide what they do next."""


def runs_whole(module: pl.LightningModule, options: Options) -> bool:
    """True if the training step runs as a whole, on all ranks."""
    own = not module.automatic_optimization or type(module).backward is not pl.LightningModule.backward
    return options.step == "whole" or (options.step == "auto" and own)


def check_module(module: pl.LightningModule, whole: bool) -> None:
    """Raise ConfigError if a module uses features that stages do not support.

    Args:
        module: the module.
        whole: the training step runs as a whole.
    """
    for problem in _problems(module, whole):
        raise ConfigError(problem)


def _problems(module: pl.LightningModule, whole: bool) -> Iterator[str]:
    name = type(module).__name__
    if not module.automatic_optimization and not whole:
        yield (
            f"{name} uses manual optimization (automatic_optimization=False), whose backward calls come from inside "
            "the step, but strategy.step=micro_batches runs the step once per micro-batch, and forwards and backwards "
            "of the stages interleave. Use strategy.step=whole (auto chooses it)."
        )
    if type(module).backward is not pl.LightningModule.backward and not whole:
        yield (
            f"{name} overrides `backward`, but in a pipeline every stage runs its own backward. Use "
            "strategy.step=whole (auto chooses it), which calls it once per mini-batch on every rank."
        )
    if lazy := [path for path, tensor in (*module.named_parameters(), *module.named_buffers()) if is_lazy(tensor)]:
        yield (
            f"{name} has {some(lazy)} without a shape: lazy modules get theirs in their first forward. Call the module "
            "once before trainer.fit, for example `with torch.no_grad(): model(example)`."
        )
    yield from compiled_steps(module, STEPS)
    for step in STEPS:
        function = getattr(module, step)
        if callable(function) and "dataloader_iter" in inspect.signature(function).parameters:  # None: switched off
            yield (
                f"{name}.{step} takes `dataloader_iter`, but mini-batches must be known before the stages start. Let "
                "the step take `batch` (and `batch_idx`)."
            )


def facts_of_trainer(trainer: pl.Trainer) -> dict[str, str]:
    """The settings, lengths of data and schedulers of training that all ranks must have alike."""
    facts = {f"trainer.{name}": text_of(getattr(trainer, name)) for name in _SETTINGS}
    facts["the number of training batches (length of the data loader)"] = str(trainer.num_training_batches)
    callbacks = getattr(trainer, "callbacks", ())
    deciding = [type(each).__name__ for each in callbacks if hasattr(each, "monitor")]  # together
    facts["the callbacks that monitor a value (trainer.callbacks)"] = text_of(deciding)
    for number, config in enumerate(trainer.lr_scheduler_configs):
        settings = {key: getattr(config, key) for key in ("interval", "frequency", "monitor", "strict")}
        facts[f"learning rate scheduler {number}"] = f"{type(config.scheduler).__name__} {settings}"
    return facts


def check_callbacks(trainer: pl.Trainer, num_devices: int) -> None:
    """Raise ConfigError for averages with BatchNorm, whose statistics come from mini-batches in a further epoch."""
    if num_devices == 1:
        return
    averages = any(isinstance(callback, StochasticWeightAveraging) for callback in getattr(trainer, "callbacks", ()))
    if averages and any(isinstance(part, BatchNorm) for part in trainer.lightning_module.modules()):
        raise ConfigError(
            "The callback StochasticWeightAveraging computes the statistics of BatchNorm anew, from mini-batches, but "
            "stages see micro-batches. Use EMAWeightAveraging(use_buffers=True), or a norm within samples "
            "(trainer.callbacks)."
        )


def check_processes(trainer: pl.Trainer, num_processes: int) -> None:
    """Raise ConfigError for callbacks that do what only one process can do."""
    callbacks = getattr(trainer, "callbacks", ()) if num_processes > 1 else ()
    if any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        raise ConfigError(
            "The callback BatchSizeFinder (trainer.callbacks; Tuner.scale_batch_size adds it) tries sizes until one "
            f"does not fit, which is an error on one of {num_processes} processes while the others wait. Leave "
            "it out, and compare the memory of each device in gpp-plan for some batch sizes."
        )
    if trainer.state.fn == TrainerFn.FITTING and any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise ConfigError(
            "The callback ModelPruning (trainer.callbacks) ranks and renames parameters during training, but each of "
            f"{num_processes} processes has those of its stages only. Prune the module before trainer.fit, for example "
            'by torch.nn.utils.prune.l1_unstructured(model.layer, "weight", amount=0.3), whose mask stays in training.'
        )


def copies_of(module: nn.Module, callbacks: Iterable[object]) -> list[nn.Module]:
    """Copies of the module that callbacks made before it was divided, such as averages."""
    kept = (value for callback in callbacks for value in vars(callback).values() if isinstance(value, nn.Module))
    parts = (part for value in kept for part in (value, getattr(value, "module", None)))
    return [part for part in parts if type(part) is type(module) and part is not module]
