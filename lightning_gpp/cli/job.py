"""A training job: the objects that a composed configuration describes, and their run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig

from lightning_gpp.cli.check import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that a run needs."""

    trainer: L.Trainer
    model: L.LightningModule
    datamodule: L.LightningDataModule


def run_job(config: DictConfig) -> None:
    """Train, test, and say where the results are.

    Raises:
        ConfigError: the configuration names something that does not exist.
    """
    job = build(config)
    if config.train:
        job.trainer.fit(job.model, datamodule=job.datamodule, ckpt_path=config.ckpt_path)
    if config.test and not job.trainer.interrupted:
        _test(job, None if config.train else config.ckpt_path)
    _finish(config)


def _test(job: Job, ckpt_path: str | None) -> None:
    """Test the best checkpoint of this run, else the given one, else the model as it is."""
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
    strategy = instantiate(config.strategy)
    datamodule = instantiate(config.data)
    model = instantiate(config.model)
    return Job(trainer=build_trainer(config, strategy), model=model, datamodule=datamodule)


def build_trainer(config: DictConfig, strategy: Strategy) -> L.Trainer:
    trainer: L.Trainer = instantiate(
        config.trainer,
        strategy=strategy,
        callbacks=_all(config.callbacks),
        logger=_all(config.logger) or False,
    )
    return trainer


def _all(group: DictConfig) -> list[Any]:
    return [instantiate(node) for node in group.values() if node is not None]
