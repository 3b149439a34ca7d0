"""A training job: the objects that a composed configuration describes, and their run."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from omegaconf import DictConfig

from lightning_gpp.checkpoints.folder import is_folder
from lightning_gpp.cli.configured import built, refusal
from lightning_gpp.cli.resume import AUTO, resuming_by_itself
from lightning_gpp.cli.settings import check_settings
from lightning_gpp.cli.sweep import METRICS
from lightning_gpp.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The objects of a run."""

    trainer: L.Trainer
    model: L.LightningModule
    datamodule: L.LightningDataModule


def run_job(config: DictConfig) -> dict[str, float]:
    """Train, test, and print where the results are. Returns the last value of every logged metric.

    Raises:
        ConfigError: the configuration names something that does not exist.
    """
    _check_checkpoint(config.ckpt_path, config.train)
    job = build(config)
    try:
        metrics = _run(job, config)
    except MisconfigurationException as error:
        raise refusal("the settings", error) from error
    _finish(config, metrics)
    return metrics


def _run(job: Job, config: DictConfig) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if config.train:
        _fit(job, config)
        metrics |= _metrics(job.trainer)
    if config.test and not job.trainer.interrupted and (_has_test(job) or not config.train):
        _test(job, None if config.train else config.ckpt_path)
        metrics |= _metrics(job.trainer)
    return metrics


def _fit(job: Job, config: DictConfig) -> None:
    if config.ckpt_path != AUTO:
        job.trainer.fit(job.model, datamodule=job.datamodule, ckpt_path=config.ckpt_path)
        return
    with resuming_by_itself(job.trainer, config.paths.output_dir):
        job.trainer.fit(job.model, datamodule=job.datamodule)


def _has_test(job: Job) -> bool:
    """True if the user's classes have a test; says what they lack otherwise."""
    missing = [
        f"{type(owner).__name__}.{name}"
        for owner, name in ((job.model, "test_step"), (job.datamodule, "test_dataloader"))
        if not is_overridden(name, owner)
    ]
    if missing:
        rank_zero_info(f"There is no test after training, as there is no {' and no '.join(missing)}.")
    return not missing


def _metrics(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _check_checkpoint(path: str | None, train: bool) -> None:
    """Refuse a checkpoint that is not there, before anything is built. Remote files are left to Lightning."""
    if path == AUTO and train:
        return
    if path == AUTO:
        raise ConfigError("ckpt_path=auto goes on with training, and train=false. Give the checkpoint to test.")
    named = path is None or "://" in path or path in ("best", "last", "hpc")
    if path is None or named or is_folder(path):
        return
    if Path(path).is_file():
        _check_format(path)
        return
    what = "is a folder, but not a whole checkpoint" if Path(path).is_dir() else "does not exist"
    raise ConfigError(f"ckpt_path={path} {what}. Give a checkpoint: runs/<name>/<date_time>/checkpoints/....ckpt.")


def _check_format(path: str) -> None:
    """Refuse files that neither torch.save nor pickle, its former format, wrote to the end."""
    with Path(path).open("rb") as file:
        begins = file.read(2)
    if not zipfile.is_zipfile(path) and begins != b"\x80\x02":
        raise ConfigError(
            f"ckpt_path={path} is not a checkpoint: torch.save did not write this file, or not to its end. Give one of "
            "runs/<name>/<date_time>/checkpoints/."
        )


def _test(job: Job, ckpt_path: str | None) -> None:
    """Test the best checkpoint of this run, or else the given one, or else the current model."""
    best = getattr(job.trainer.checkpoint_callback, "best_model_path", "") or ckpt_path
    job.trainer.test(job.model, datamodule=job.datamodule, ckpt_path=best or None)


@rank_zero_only
def _finish(config: DictConfig, metrics: Mapping[str, float]) -> None:
    folder = Path(config.paths.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).write_text(f"{json.dumps(metrics, indent=2)}\n")
    print(f"Run folder: {config.paths.output_dir}")


def build(config: DictConfig) -> Job:
    """Seed, then build strategy, data module, model and trainer; the strategy first, as it checks its options.

    Raises:
        ConfigError: the configuration names something that does not exist.
    """
    check_settings(config)
    seed_all(config.seed)
    strategy = built(config.strategy)
    datamodule = built(config.data, L.LightningDataModule)
    model = built(config.model, L.LightningModule)
    return Job(trainer=build_trainer(config, strategy), model=model, datamodule=datamodule)


def seed_all(seed: Any) -> None:
    """Seed all generators of this process.

    Raises:
        ConfigError: the seed is not one that they take.
    """
    if seed is None:
        return
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} is not a whole number from 0 to {2**32 - 1}; seed=null leaves it to chance.")
    L.seed_everything(seed, workers=True, verbose=False)


def build_trainer(config: DictConfig, strategy: Strategy) -> L.Trainer:
    """The trainer with its callbacks and loggers.

    Raises:
        ConfigError: Lightning refuses the settings, for example because this machine has no GPU.
    """
    parts = {
        "callbacks": _all(config.callbacks, "callbacks", L.Callback),
        "logger": _all(config.logger, "logger", Logger) or False,
    }
    try:
        trainer: L.Trainer = built(config.trainer, L.Trainer, strategy=strategy, **parts)
    except ConfigError as error:
        reason = error.__cause__.__cause__ if isinstance(error.__cause__, InstantiationException) else None
        if not isinstance(reason, MisconfigurationException | TypeError | ValueError):
            raise
        settings = ", ".join(f"trainer.{key}={config.trainer[key]}" for key in _meant(config.trainer, str(reason)))
        remedy = " trainer=cpu runs on any machine." if config.trainer.accelerator != "cpu" else ""
        raise refusal(settings, reason, remedy) from error
    return trainer


def _meant(trainer: DictConfig, reason: str) -> list[str]:
    """The keys of the trainer whose names a refusal mentions; or else those that depend on the machine."""
    named = [key for key in map(str, trainer) if re.search(rf"\b{key}\b", reason)]
    machine = ["accelerator", "devices", "precision"]
    return machine if not named or set(named) & set(machine) else named


def _all(group: DictConfig, name: str, kind: type) -> list[Any]:
    """The objects of a group with any number of them.

    Raises:
        ConfigError: an entry describes no object, or one of another kind, or it cannot be built.
    """
    for key, node in ((str(key), node) for key, node in group.items()):
        if node is not None and not isinstance(node, DictConfig):
            raise ConfigError(
                f"{name}.{key}={node} describes no object. Choose a file of the group ({name}=...), give the entry a "
                f"_target_, or leave it out with {name}.{key}=null."
            )
    return [built(node, kind) for node in group.values() if node is not None]
