"""What a run would do, without running it: the plan, and the simulated timeline of one mini-batch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig
from torch.utils import _pytree as pytree

from lightning_gpp._compat import attach_data, transferred
from lightning_gpp.capture import Capture
from lightning_gpp.capture.declared import Declared
from lightning_gpp.cli.check import check
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.planning import devices_per_pipeline
from lightning_gpp.reports import graph_text, plan_table, timeline_svg, timeline_text
from lightning_gpp.simulation import Timeline
from lightning_gpp.strategy import GPPStrategy
from lightning_gpp.strategy.data import outline, peek
from lightning_gpp.strategy.options import Options
from lightning_gpp.strategy.planner import captured_step, devices_wanted, plan_for
from lightning_gpp.strategy.reporting import simulated

CPU = torch.device("cpu")


def show(config: DictConfig) -> None:
    """Print the plan and its timeline; write the files that `output`, `timeline` and `svg` name.

    Raises:
        ConfigError: the configuration cannot work.
    """
    plan, timeline = make_plan(config)
    print(plan_table(plan), graph_text(plan), timeline_text(timeline), sep="\n\n")
    if config.output:
        plan.save(config.output)
    if config.timeline:
        timeline.save(config.timeline)
    if config.svg:
        Path(config.svg).write_text(timeline_svg(timeline))


def make_plan(config: DictConfig) -> tuple[Plan, Timeline]:
    """Capture the training step on the first mini-batch, plan for the devices of the trainer, simulate."""
    check(config)
    strategy, world_size = instantiate(config.strategy), num_processes(config.trainer)
    if not isinstance(strategy, GPPStrategy):
        raise ConfigError(f"gpp-plan plans for strategy=gpp, not for {type(strategy).__name__}.")
    if config.seed is not None:
        L.seed_everything(config.seed, workers=True, verbose=False)
    options = strategy.options
    step = captured(config, options)
    plan = plan_for(step, options, num_devices(options, world_size))
    return plan, simulated(plan, step.graph)


def num_devices(options: Options, world_size: int) -> int:
    """Devices of one pipeline."""
    if options.num_pipelines is not None:
        return devices_per_pipeline(world_size, options.num_pipelines)
    return devices_wanted(options, world_size)


def num_processes(trainer: DictConfig) -> int:
    """`trainer.devices` x `trainer.num_nodes`; this machine is not looked at.

    Raises:
        ConfigError: the configuration does not give a number.
    """
    devices = trainer.devices
    if isinstance(devices, ListConfig):
        devices = len(devices)
    if not str(devices).isdigit() or int(devices) < 1:
        raise ConfigError(
            f"trainer.devices={devices}: gpp-plan does not look at this machine's devices. Say for how many it is to "
            "plan, for example trainer.devices=4."
        )
    return int(devices) * int(trainer.num_nodes)


def captured(config: DictConfig, options: Options) -> Capture | Declared:
    """The training step on the first mini-batch, under the configured precision."""
    trainer, datamodule = _quiet_trainer(config.trainer.precision), instantiate(config.data)
    model: L.LightningModule = instantiate(config.model)
    trainer.precision_plugin.convert_module(model)
    attach_data(trainer, model, datamodule)
    batch = first_batch(datamodule) if options.example_batch is None else options.example_batch
    model.setup("fit")
    model.configure_model()
    example = outline(transferred(model, batch, CPU))
    return captured_step(model, example, "training_step", options, trainer.precision_plugin.train_step_context, CPU)


def first_batch(datamodule: L.LightningDataModule) -> Any:
    """The first mini-batch of the training data, in the structure of its loaders."""
    datamodule.prepare_data()
    datamodule.setup("fit")
    loaders = datamodule.train_dataloader()
    return pytree.tree_map(peek, getattr(loaders, "iterables", loaders))


def _quiet_trainer(precision: Any) -> L.Trainer:
    """A trainer for what module, data and precision ask of it; it runs nothing."""
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return L.Trainer(accelerator="cpu", devices=1, precision=precision, logger=False, enable_checkpointing=False)
