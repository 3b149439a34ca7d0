"""Checks before training starts: refuse settings that cannot work in stages, with the reason and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, BatchSizeFinder, StochasticWeightAveraging

from lightning_gpp._compat.lightning import closure_repeated, uses_dataloader_iter
from lightning_gpp.errors import ConfigError
from lightning_gpp.training.agreement import text_of
from lightning_gpp.training.compiled import compiled_steps
from lightning_gpp.training.options import Options

_SETTINGS = (
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

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def runs_whole(module: pl.LightningModule, options: Options) -> bool:
    """True if the training step runs as a whole, on all ranks."""
    return options.step == "whole" or (options.step == "auto" and not module.automatic_optimization)


def check_module(module: pl.LightningModule, whole: bool) -> None:
    """Raise ConfigError if a module uses features that stages do not support. `whole`: the step runs as a whole."""
    for problem in _problems(module, whole):
        raise ConfigError(problem)


def _problems(module: pl.LightningModule, whole: bool) -> Iterator[str]:
    name = type(module).__name__
    if not module.automatic_optimization and not whole:
        yield (
            f"{name} uses manual optimization (automatic_optimization=False), whose backward calls come from inside "
            "the step, but strategy.step=micro_batches runs the step once per micro-batch, and forwards and backwards "
            "of the stages interleave. Use strategy.step=whole (auto chooses it), or automatic optimization."
        )
    if type(module).backward is not pl.LightningModule.backward and not whole:
        yield (
            f"{name} overrides `backward`, but in a pipeline every stage runs its own backward. Use "
            "strategy.step=whole, which calls it once per mini-batch on every rank; or put the change into the loss, "
            "or use `on_after_backward` to change gradients."
        )
    yield from compiled_steps(module, STEPS)
    for step in STEPS:
        if uses_dataloader_iter(getattr(module, step)):
            yield (
                f"{name}.{step} takes `dataloader_iter`, but mini-batches must be known before the stages start. Let "
                "it take `batch` (and `batch_idx`)."
            )


def once(closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure, which raises ConfigError when it is called again."""
    calls = 0

    def called() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise closure_repeated()
        return closure()

    return called


def facts_of_trainer(trainer: pl.Trainer) -> dict[str, str]:
    """The settings, lengths of data and schedulers of training that all ranks must have alike."""
    facts = {f"trainer.{name}": text_of(getattr(trainer, name)) for name in _SETTINGS}
    facts["the number of training batches (length of the data loader)"] = str(trainer.num_training_batches)
    for number, config in enumerate(trainer.lr_scheduler_configs):
        settings = {key: getattr(config, key) for key in ("interval", "frequency", "monitor", "strict")}
        facts[f"learning rate scheduler {number}"] = f"{type(config.scheduler).__name__} {settings}"
    return facts


def facts_of_loaders(step: str, num_batches: Iterable[float]) -> dict[str, str]:
    """The lengths of the data of an evaluation."""
    return {f"the numbers of batches for {step} (lengths of the data loaders)": str(list(num_batches))}


def check_callbacks(trainer: pl.Trainer) -> None:
    """Raise ConfigError for callbacks that work on the full module."""
    kinds: tuple[type, ...] = (StochasticWeightAveraging, BatchSizeFinder, BaseFinetuning, *_averaging())
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, kinds):
            raise ConfigError(
                f"The callback {type(callback).__name__} copies, restores or compares the full module, but every rank "
                "holds only a part of it. Remove it (trainer.callbacks)."
            )


def _averaging() -> tuple[type, ...]:
    found = getattr(pl.callbacks, "WeightAveraging", None)
    return () if found is None else (found,)


def check_layer_sync(layer_sync: object) -> None:
    """Raise ConfigError for BatchNorm over all processes."""
    if layer_sync is not None:
        raise ConfigError(
            "trainer.sync_batchnorm=True would average BatchNorm's statistics over stages that do not share layers. "
            "Set it to False; with several pipelines use torch.nn.SyncBatchNorm with a process group of your own."
        )
