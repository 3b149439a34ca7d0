"""The tasks of `gpp-plan`: what is planned, for which machine, and the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_gpp.cli.configured import built
from lightning_gpp.cli.job import seed_all
from lightning_gpp.cli.subject import Step, captured
from lightning_gpp.cluster import Cluster, cluster_of
from lightning_gpp.cluster.presets import MAX_DEVICES
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction, count_pipelines, devices_per_pipeline
from lightning_gpp.reports.terminal import SEARCHING, working
from lightning_gpp.strategy import GPPStrategy
from lightning_gpp.training.host import TRAINING
from lightning_gpp.training.measured.machine import Machine, of_groups, predicted, resolved
from lightning_gpp.training.options import Options
from lightning_gpp.training.planner import check_devices, devices_wanted, evaluated, part_of_member, planned
from lightning_gpp.training.whole.whole_step import noted_whole, ordered_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A subject to plan, the machine to plan for, and the settings of the search.

    `num_devices`: those of one pipeline, or all of the machine's if the search chooses `num_pipelines` (None).
    """

    subject: Step
    options: Options
    machine: Machine
    num_devices: int
    num_pipelines: int | None


def predict(task: Task) -> Prediction:
    """Make the task's plan, and simulate a mini-batch.

    Raises:
        ConfigError: the settings contradict each other.
        PlanError: nothing fits the devices.
    """
    step, options, number = task.subject.step, task.options, task.num_devices
    with working(SEARCHING):
        plan, prediction = planned(step, options, lambda: task.machine, number, num_pipelines=task.num_pipelines)
    if prediction is not None:
        return replace(prediction, plan=noted_whole(plan, task.subject.whole))
    check_devices(plan, task.num_devices)
    return applied(task, plan)


def applied(task: Task, plan: Plan) -> Prediction:
    """The prediction for a given plan, with as many pipelines as the machine has devices for."""
    number, graph = count_pipelines(plan, task.machine.cluster.num_devices), task.subject.step.graph
    return predicted(plan, graph, task.machine, number, task.options.weights)


def task_of(config: DictConfig) -> Task:
    """The task that the configuration describes.

    Raises:
        ConfigError: the configuration cannot work.
    """
    strategy = built(config.strategy)
    if not isinstance(strategy, GPPStrategy):
        raise ConfigError(f"gpp-plan plans for strategy=gpp, not for {type(strategy).__name__}.")
    options = strategy.options
    whole = cluster_for(config, options)
    seed_all(config.seed)
    subject = captured(config, options)
    machine = Machine(cluster=whole.with_headroom(options.memory_headroom), footprint=subject.footprint)
    subject, machine = of_members(subject, machine, options.members)
    whole = machine.cluster
    if config.step != TRAINING:
        step, options, there = evaluated(subject.step, options, lambda: machine)
        subject, machine = replace(subject, step=step), there()
    per_pipeline = num_devices(options, whole.num_devices)
    replicable = config.get("cluster") is not None and options.num_pipelines is None
    return Task(
        subject=subject,
        options=ordered_for(options, subject.whole),
        machine=machine,
        num_devices=per_pipeline,
        num_pipelines=None if replicable else whole.num_devices // per_pipeline,
    )


def of_members(subject: Step, machine: Machine, members: int) -> tuple[Step, Machine]:
    """The part of one process of a device, and the machine of groups of so many processes.

    Raises:
        ConfigError: they do not divide the machine.
    """
    if members == 1:
        return subject, machine
    if machine.cluster.num_devices % members:
        raise ConfigError(
            f"strategy.tensor_parallel_size={members} does not divide the {machine.cluster.num_devices} devices of "
            f"cluster {machine.cluster.name!r}. Choose a divisor."
        )
    machine = of_groups(machine, subject.divided or {}, members, subject.captured.graph)
    return replace(subject, step=part_of_member(subject.captured, machine)), machine


def cluster_for(config: DictConfig, options: Options) -> Cluster:
    """All devices to plan for: those of `cluster`, or else as many of `strategy.cluster` as the trainer has.

    Raises:
        ConfigError: no setting names them.
    """
    if config.get("cluster") is not None:
        settings: Any = OmegaConf.to_container(config.cluster, resolve=True)
        return cluster_of(settings)
    known = options.cluster
    if isinstance(known, Cluster) and str(config.trainer.devices) == "auto":
        return known
    world_size = num_processes(config.trainer)
    kind = device_type(config.trainer.accelerator)
    if known is None and kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.accelerator={config.trainer.accelerator}, but this machine has no GPU to plan for. Name the "
            "devices, for example cluster=dgx_h100 cluster.num_nodes=2."
        )
    return resolved(known, world_size, config.trainer.get("num_nodes", 1), kind)


def device_type(accelerator: str) -> str:
    """ "cuda" or "cpu", from `trainer.accelerator`, or from this machine if that leaves it open.

    Raises:
        ConfigError: there are no plans for such devices.
    """
    kinds = {"auto": "cuda" if torch.cuda.is_available() else "cpu", "cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}
    if accelerator not in kinds:
        raise ConfigError(f"trainer.accelerator={accelerator}: plans are made for {', '.join(kinds)}. Choose one.")
    return kinds[accelerator]


def num_devices(options: Options, world_size: int) -> int:
    """Number of devices of one pipeline."""
    if options.num_pipelines is not None:
        return devices_per_pipeline(world_size, options.num_pipelines)
    return devices_wanted(options, world_size)


def num_processes(trainer: DictConfig) -> int:
    """`trainer.devices` x `trainer.num_nodes`, independent of this machine.

    Raises:
        ConfigError: the configuration does not give a number.
    """
    devices: Any = len(trainer.devices) if isinstance(trainer.devices, ListConfig) else trainer.devices
    num_nodes = trainer.get("num_nodes", 1)
    for key, value in (("devices", devices), ("num_nodes", num_nodes)):
        if not str(value).isdecimal() or int(value) < 1:
            raise ConfigError(
                f"trainer.{key}={value} must be a whole number of 1 or more for gpp-plan, which does not look at this "
                "machine, for example trainer.devices=4."
            )
    number = int(devices) * int(num_nodes)
    if number > MAX_DEVICES:
        raise ConfigError(
            f"trainer.devices={devices} x trainer.num_nodes={num_nodes} are {number} devices; a cluster has at "
            f"most {MAX_DEVICES}."
        )
    return number
