"""A training job: the objects that a composed configuration describes, and their run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from omegaconf import DictConfig

from lightning_gpp._compat.torch import pytree
from lightning_gpp.cli.configured import built, refusal
from lightning_gpp.errors import ConfigError, did_you_mean

AUTO: Final = "auto"
"""The value of `ckpt_path` for the newest checkpoint in the run folder."""

TASKS: Final = ("fit", "validate", "test", "predict")
"""The methods of the Trainer that a run may call."""

METRICS: Final = "metrics.json"
"""File in the run folder with the last value of every logged metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The objects of a run."""

    trainer: L.Trainer
    model: L.LightningModule
    datamodule: L.LightningDataModule


def run_job(config: DictConfig) -> None:
    """Do the task, and print where the results are.

    Raises:
        ConfigError: the configuration names something that does not exist.
    """
    if config.task not in TASKS:
        raise ConfigError(f"task={config.task} does not exist.{did_you_mean(config.task, TASKS)}")
    path = checkpoint_of(config)
    job = build(config)
    try:
        metrics = _run(job, config, path)
    except MisconfigurationException as error:
        raise refusal("the settings", error) from error
    _finish(config, metrics)


def checkpoint_of(config: DictConfig) -> str | None:
    """The checkpoint that the settings name, or the newest one of the run folder; None if there is none.

    All processes choose for themselves, so those of several machines need a folder that they share.

    Raises:
        ConfigError: it does not exist.
    """
    path: str | None = config.ckpt_path
    if path == AUTO:
        found = newest_checkpoint(config.paths.output_dir)
        rank_zero_info(f"ckpt_path={AUTO}: {found or f'{config.paths.output_dir} has no checkpoint'}")
        return found
    if path is None or "://" in path or path in ("best", "last", "hpc") or Path(path).exists():
        return path
    raise ConfigError(f"ckpt_path={path} does not exist. Give one of runs/<name>/<date_time>/checkpoints/.")


def newest_checkpoint(folder: str | Path) -> str | None:
    """The checkpoint, file or folder, that was written last into the folder or below; None if there is none.

    Checkpoints that are being written are in a folder whose name begins with a dot (`checkpoints/atomic.py`).
    """
    paths = [path for path in Path(folder).rglob("*.ckpt") if not path.parent.name.startswith(".")]
    newest = max(paths, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else str(newest)


def _run(job: Job, config: DictConfig, path: str | None) -> dict[str, float]:
    results = getattr(job.trainer, config.task)(job.model, datamodule=job.datamodule, ckpt_path=path)
    if config.task == "predict":
        _keep(results, job.trainer, config)
    metrics = _metrics(job.trainer)
    if config.task == "fit" and config.test and not job.trainer.interrupted and _has_test(job):
        best = getattr(job.trainer.checkpoint_callback, "best_model_path", "")
        job.trainer.test(job.model, datamodule=job.datamodule, ckpt_path=best or None)
        metrics |= _metrics(job.trainer)
    return metrics


def _keep(predictions: Any, trainer: L.Trainer, config: DictConfig) -> None:
    """Write what `predict` returned into the run folder of rank 0: a file for each pipeline."""
    folder = Path(trainer.strategy.broadcast(config.paths.output_dir))
    if any(each is not None for each in pytree.tree_leaves(predictions)):
        number = (trainer.distributed_sampler_kwargs or {"rank": 0})["rank"]
        torch.save(predictions, folder / f"predictions_{number}.pt")


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


@rank_zero_only
def _finish(config: DictConfig, metrics: Mapping[str, float]) -> None:
    folder = Path(config.paths.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).write_text(f"{json.dumps(metrics, indent=2)}\n")
    print(f"Run folder: {config.paths.output_dir}")


def build(config: DictConfig) -> Job:
    """Seed, then build strategy, data module, model and trainer; the strategy first, as it checks its options.

    Raises:
        ConfigError: the configuration names something that does not exist, or Lightning refuses the settings.
    """
    seed_all(config.seed)
    strategy = built(config.strategy)
    datamodule = built(config.data, L.LightningDataModule)
    model = built(config.model, L.LightningModule)
    parts = {
        "callbacks": _callbacks(config),
        "logger": _all(config.logger, "logger", Logger) or False,
    }
    trainer = built(config.trainer, L.Trainer, strategy=strategy, **parts)
    return Job(trainer=trainer, model=model, datamodule=datamodule)


def _callbacks(config: DictConfig) -> list[L.Callback]:
    """The callbacks; without a terminal also a progress bar for files, where Lightning's own shows only its end."""
    chosen: list[L.Callback] = _all(config.callbacks, "callbacks", L.Callback)
    wanted = config.trainer.get("enable_progress_bar") is not False
    if wanted and not sys.stdout.isatty() and not any(isinstance(each, ProgressBar) for each in chosen):
        chosen.append(TQDMProgressBar(refresh_rate=config.trainer.get("log_every_n_steps") or 50))
    return chosen


def seed_all(seed: int | None) -> None:
    """Seed all generators of this process; None leaves them to chance.

    Raises:
        ConfigError: it is no whole number of 32 bits.
    """
    if seed is not None:
        try:
            L.seed_everything(seed, workers=True, verbose=False)
        except ValueError as error:
            raise refusal(f"seed={seed}", error) from error


def _all(group: DictConfig, name: str, kind: type) -> list[Any]:
    """The objects of a group with any number of them.

    Raises:
        ConfigError: an entry describes no object, or one of another kind, or it cannot be built.
    """
    for key, node in ((str(key), node) for key, node in group.items()):
        if node is not None and not isinstance(node, DictConfig):
            raise ConfigError(f"{name}.{key}={node} describes no object. Give the entry a _target_.")
    return [built(node, kind) for node in group.values() if node is not None]
