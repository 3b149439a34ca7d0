"""From a composed configuration to the objects that it describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_gpp.cli.check import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that a run needs."""

    trainer: L.Trainer
    model: L.LightningModule
    datamodule: L.LightningDataModule


def build(config: DictConfig) -> Job:
    """Seed, then build data module, model and trainer.

    Raises:
        ConfigError: the configuration names something that does not exist.
    """
    check(config)
    if config.seed is not None:
        L.seed_everything(config.seed, workers=True, verbose=False)
    datamodule = instantiate(config.data)
    model = instantiate(config.model)
    return Job(trainer=build_trainer(config), model=model, datamodule=datamodule)


def build_trainer(config: DictConfig) -> L.Trainer:
    trainer: L.Trainer = instantiate(
        config.trainer,
        strategy=instantiate(config.strategy),
        callbacks=_all(config.callbacks),
        logger=_all(config.logger) or False,
    )
    return trainer


def _all(group: DictConfig) -> list[Any]:
    return [instantiate(node) for node in group.values() if node is not None]
