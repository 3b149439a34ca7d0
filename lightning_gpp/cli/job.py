"""A training job: the objects that a composed configuration describes, and their run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig

from lightning_gpp.cli.check import check
from lightning_gpp.cli.target import built
from lightning_gpp.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The objects of a run."""

    trainer: L.Trainer
    model: L.LightningModule
    datamodule: L.LightningDataModule


def run_job(config: DictConfig) -> None:
    """Train, test, and print where the results are.

    Raises:
        ConfigError: the configuration names something that does not exist.
    """
    _check_checkpoint(config.ckpt_path)
    job = build(config)
    if config.train:
        job.trainer.fit(job.model, datamodule=job.datamodule, ckpt_path=config.ckpt_path)
    if config.test and not job.trainer.interrupted:
        _test(job, None if config.train else config.ckpt_path)
    _finish(config)


def _check_checkpoint(path: str | None) -> None:
    """Refuse a checkpoint that is not there, before anything is built. Remote files are left to Lightning."""
    if path is None or "://" in path or path in ("best", "last", "hpc") or Path(path).is_file():
        return
    what = "is a folder" if Path(path).is_dir() else "does not exist"
    raise ConfigError(f"ckpt_path={path} {what}. Give a checkpoint: runs/<name>/<date_time>/checkpoints/....ckpt.")


def _test(job: Job, ckpt_path: str | None) -> None:
    """Test the best checkpoint of this run, or else the given one, or else the current model."""
    best = getattr(job.trainer.checkpoint_callback, "best_model_path", "") or ckpt_path
    job.trainer.test(job.model, datamodule=job.datamodule, ckpt_path=best or None)


@rank_zero_only
def _finish(config: DictConfig) -> None:
    print(f"Run folder: {config.paths.output_dir}")


def build(config: DictConfig) -> Job:
    """Seed, then build strategy, data module, model and trainer; the strategy first, as it checks its options.

    Raises:
        ConfigError: the configuration names something that does not exist.
    """
    check(config)
    if config.seed is not None:
        L.seed_everything(config.seed, workers=True, verbose=False)
    strategy = built(config.strategy)
    datamodule = built(config.data)
    model = built(config.model)
    return Job(trainer=build_trainer(config, strategy), model=model, datamodule=datamodule)


def build_trainer(config: DictConfig, strategy: Strategy) -> L.Trainer:
    """The trainer with its callbacks and loggers.

    Raises:
        ConfigError: Lightning refuses the settings, for example because this machine has no GPU.
    """
    parts = {"callbacks": _all(config.callbacks), "logger": _all(config.logger) or False}
    try:
        trainer: L.Trainer = built(config.trainer, strategy=strategy, **parts)
    except InstantiationException as error:
        if not isinstance(error.__cause__, MisconfigurationException | TypeError | ValueError):
            raise
        settings = ", ".join(f"trainer.{key}={config.trainer[key]}" for key in ("accelerator", "devices", "precision"))
        remedy = " trainer=cpu runs on any machine." if config.trainer.accelerator != "cpu" else ""
        raise ConfigError(f"Lightning refuses {settings}: {' '.join(str(error.__cause__).split())}{remedy}") from error
    return trainer


def _all(group: DictConfig) -> list[Any]:
    return [built(node) for node in group.values() if node is not None]
