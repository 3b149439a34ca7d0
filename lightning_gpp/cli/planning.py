"""gpp-plan: predicts a run without running it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from lightning_gpp.cli.check import check
from lightning_gpp.cli.job import seed_all
from lightning_gpp.cli.subject import GraphFile, Step, captured, graph_file
from lightning_gpp.cli.target import built
from lightning_gpp.cli.worth import too_small
from lightning_gpp.cluster import Cluster, cluster_of
from lightning_gpp.cluster.presets import MAX_DEVICES
from lightning_gpp.errors import ConfigError, GPPError, PlanError
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction, count_pipelines, devices_per_pipeline
from lightning_gpp.planning.assignment.layout_check import layout_mismatch
from lightning_gpp.planning.problem.prediction import memory_limits
from lightning_gpp.planning.search import REMARK
from lightning_gpp.reports import graph_svg, prediction_text, search_progress, timeline_svg
from lightning_gpp.reports.page import report_html
from lightning_gpp.reports.terminal import show as show_text
from lightning_gpp.reports.terminal import terminal_width, wrapped
from lightning_gpp.reports.units import rate
from lightning_gpp.simulation import trace_of
from lightning_gpp.slices import unsliced
from lightning_gpp.strategy import GPPStrategy
from lightning_gpp.training.eight_bit import check_patterns
from lightning_gpp.training.machine import Machine, of_groups, resolved
from lightning_gpp.training.option_values import AUTO
from lightning_gpp.training.options import Options
from lightning_gpp.training.planner import (
    TRAINING,
    check_devices,
    devices_wanted,
    evaluated,
    part_of_member,
    planned,
)
from lightning_gpp.training.predicted import simulated, without_flush
from lightning_gpp.training.replicas import idle_sharding
from lightning_gpp.training.whole_step import noted_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A subject to plan, the machine to plan for, and the settings of the search.

    `num_devices`: those of one pipeline, or all of the machine's if the search chooses `num_pipelines` (None).
    """

    subject: GraphFile | Step
    options: Options
    machine: Machine
    num_devices: int
    num_pipelines: int | None


def show(config: DictConfig) -> None:
    """Print the plan, its timeline, memory and search; write the files that the settings name.

    Raises:
        ConfigError: the configuration cannot work.
        PlanError: nothing fits the devices.
    """
    if config.schedules is not None:
        raise ConfigError(
            f"schedules={config.schedules} is for gpp-plan compare, which has one row per schedule. Use gpp-plan "
            "compare schedules=..., or strategy.schedule=... for the schedule of one plan."
        )
    check_outputs(config, _OUTPUTS)
    task, prediction, compared = best_of_degrees(config)
    told = REMARK in prediction.plan.notes  # that fewer devices are faster, or why some are idle
    small = () if told else too_small(prediction, task.subject.step, task.machine, task.options)
    width = terminal_width()
    notes = (*_advice(prediction), *compared, *_members(task), *small, *task.subject.notes)
    below = (f"\n{wrapped(note, width, 0)}" for note in notes)
    show_text("\n".join([prediction_text(prediction, width), *below]), prediction.plan)
    title = f"{config.name} on {task.machine.cluster.name}"
    write_outputs(
        config,
        {
            "output": prediction.plan.save,
            "timeline": prediction.drawn.save,
            "trace": trace_of(prediction.drawn).save,
            "svg": lambda path: path.write_text(timeline_svg(prediction.drawn)),
            "graph_svg": lambda path: path.write_text(graph_svg(prediction.plan)),
            "report": lambda path: path.write_text(report_html(prediction, title=title, notes=notes), encoding="utf-8"),
        },
    )


_OUTPUTS = ("output", "timeline", "trace", "svg", "graph_svg", "report")


def check_outputs(config: DictConfig, keys: Sequence[str]) -> None:
    """Refuse files that cannot be written, before a long search.

    Raises:
        ConfigError: the file that one of the keys names cannot be written, or is that of another key.
    """
    owners: dict[str, str] = {}
    for key in _given(config, keys):
        if owners.setdefault(config[key], key) != key:
            raise ConfigError(f"{key}={config[key]} is the file of {owners[config[key]]}, too. Give it another name.")
    for key in _given(config, keys):
        path = Path(config[key])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            existed = path.exists()
            path.open("a").close()
            if not existed:
                path.unlink()  # the plan writes it again
        except OSError as error:
            raise _unwritable(key, path, error) from error


def write_outputs(config: DictConfig, writers: Mapping[str, Callable[[Path], object]]) -> None:
    """Write the files that the settings name, each by the function of its key.

    Raises:
        ConfigError: a file cannot be written to its end.
    """
    for key in _given(config, writers):
        try:
            writers[key](Path(config[key]))
        except OSError as error:
            raise _unwritable(key, config[key], error) from error
        print(f"{key}: wrote {config[key]}")


def _given(config: DictConfig, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if config.get(key) is not None]


def _unwritable(key: str, path: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"{key}={path} cannot be written: {error.strerror}.")


def predict(task: Task) -> Prediction:
    """Make the task's plan, and simulate a mini-batch.

    Raises:
        ConfigError: the settings contradict each other.
        PlanError: nothing fits the devices.
    """
    with search_progress() as progress:
        result = planned(
            task.subject.step,
            task.options,
            lambda: task.machine,
            task.num_devices,
            num_pipelines=task.num_pipelines,
            bound_seconds=task.options.bound_seconds,
            progress=progress,
        )
    check_patterns(unsliced(result.plan).plan, task.options.eight_bit_edges)
    if result.prediction is not None:
        return replace(result.prediction, plan=noted_whole(result.prediction.plan, task.subject.whole))
    check_devices(result.plan, task.num_devices)
    return applied(task, result.plan)


def applied(task: Task, plan: Plan) -> Prediction:
    """The prediction for a given plan, with as many pipelines as the machine has devices for."""
    number, graph = count_pipelines(plan, task.machine.cluster.num_devices), task.subject.step.graph
    return Prediction(
        plan=plan,
        num_pipelines=number,
        timeline=simulated(plan, graph, task.machine, number),
        memory_bytes=memory_limits(plan, task.machine.cluster),
        period=without_flush(plan, graph, task.machine, number, task.options.weights),
    )


def best_of_degrees(config: DictConfig) -> tuple[Task, Prediction, list[str]]:
    """The task and its plan; with `strategy.tensor_parallel_size=auto` those of the fastest number, and a comparison.

    Raises:
        ConfigError, PlanError: there is no plan with one process per device, nor with more.
    """
    if config.strategy.get("tensor_parallel_size") != AUTO:
        task = task_of(config)
        return task, predict(task), []
    plans, failures, reasons = dict[int, tuple[Task, Prediction]](), list[GPPError](), list[str]()
    for degree in DEGREES:
        try:
            task = _of_degree(config, degree)
            plans[degree] = task, predict(task)
        except PlanError as error:
            failures.append(error)
            reasons.append(f"{degree}: no plan")
        except GPPError as error:  # what cannot be divided among these, cannot among more
            failures.append(error)
            reasons.append(f"{degree}: not possible. {error}")
            break
    if not plans:
        raise failures[0]
    best = max(plans, key=lambda degree: (plans[degree][1].fits, plans[degree][1].samples_per_second))
    rows = [f"{degree}: {rate(prediction.samples_per_second)} samples/s" for degree, (_, prediction) in plans.items()]
    return *plans[best], [f"Fastest: strategy.tensor_parallel_size={best}. {'; '.join([*rows, *reasons])}"]


DEGREES: Final = (1, 2, 4, 8)
"""Numbers of processes per device that `auto` compares."""


def _of_degree(config: DictConfig, degree: int) -> Task:
    """The task with this number of processes per device, and its part of the time for searches.

    Raises:
        ConfigError: the processes are not all in one node.
    """
    config = config.copy()
    with open_dict(config):
        config.strategy.tensor_parallel_size = degree
        config.strategy.search_seconds = config.strategy.get("search_seconds", Options().search_seconds) / len(DEGREES)
    task = task_of(config)
    members = None if task.machine.divided is None else task.machine.divided.members
    if members is not None and len({members.node_of(member) for member in range(degree)}) > 1:
        raise ConfigError(f"The {degree} processes of a device would be on several nodes.")
    return task


def _members(task: Task) -> list[str]:
    """The meaning of figures of a device that is several processes."""
    divided = task.machine.divided
    if divided is None:
        return []
    return [
        f"Every device of the plan is {divided.degree} neighbouring processes (tensor parallelism); parameters, FLOPs, "
        f"activations and memory are those of one of them. {task.machine.cluster.num_devices} devices are "
        f"{divided.degree * task.machine.cluster.num_devices} processes."
    ]


def _advice(prediction: Prediction) -> list[str]:
    """Drawbacks of schedule and sharding for this plan, and how to train with several pipelines."""
    number, plan = prediction.num_pipelines, prediction.plan
    reason = layout_mismatch(plan, plan.schedule)
    idle = idle_sharding(plan, number)
    notes = [*([f"{plan.schedule}: {reason}"] if reason else []), *([idle] if idle else [])]
    if number == 1:
        return notes
    return [
        *notes,
        f"{number} pipelines of {plan.num_devices} devices each share the work: train with "
        f"strategy.num_pipelines={number}. A data loader's batch is that of one pipeline: {plan.batch_size} samples, "
        f"{number * plan.batch_size} in total.",
    ]


def task_of(config: DictConfig) -> Task:
    """The task that the configuration describes.

    Raises:
        ConfigError: the configuration cannot work.
    """
    check(config)
    strategy = built(config.strategy)
    if not isinstance(strategy, GPPStrategy):
        raise ConfigError(f"gpp-plan plans for strategy=gpp, not for {type(strategy).__name__}.")
    options = strategy.options
    whole = cluster_for(config, options)
    seed_all(config.seed)
    subject = captured(config, options) if config.graph is None else graph_file(config)
    costs = subject.costs(options, whole, torch.device(device_type(config.trainer.accelerator)))
    machine = Machine(cluster=whole.with_headroom(options.memory_headroom), footprint=subject.footprint, costs=costs)
    subject, machine = of_members(subject, machine, options.num_members)
    whole = machine.cluster
    if config.step != TRAINING:
        if isinstance(subject, GraphFile):
            raise ConfigError(f"step={config.step} needs a model; a graph from a file (graph=...) is a training step.")
        step, options, there = evaluated(subject.step, options, lambda: machine)
        subject, machine = replace(subject, step=step), there()
    per_pipeline = num_devices(options, whole.num_devices)
    replicable = config.get("cluster") is not None and options.num_pipelines is None
    return Task(
        subject=subject,
        options=options,
        machine=machine,
        num_devices=per_pipeline,
        num_pipelines=None if replicable else whole.num_devices // per_pipeline,
    )


def of_members(subject: GraphFile | Step, machine: Machine, degree: int) -> tuple[GraphFile | Step, Machine]:
    """The part of one process of a device, and the machine of groups of processes.

    Raises:
        ConfigError: nobody knows what they divide.
    """
    if degree == 1:
        return subject, machine
    if isinstance(subject, GraphFile) or subject.divided is None:
        raise ConfigError(
            f"strategy.tensor_parallel_size={degree} needs a model, whose configure_model divides it; a graph from a "
            "file (graph=...) has none. Leave it out."
        )
    if machine.cluster.num_devices % degree:
        raise ConfigError(
            f"strategy.tensor_parallel_size={degree} does not divide the {machine.cluster.num_devices} devices of "
            f"cluster {machine.cluster.name!r}. Choose a divisor."
        )
    machine = of_groups(machine, subject.divided, degree, subject.captured.graph)
    part = part_of_member(subject.captured, machine)
    return replace(subject, step=part), machine


def cluster_for(config: DictConfig, options: Options) -> Cluster:
    """All devices to plan for: those of `cluster`, or else as many of `strategy.cluster` as the trainer has.

    Raises:
        ConfigError: no setting names them.
    """
    if config.get("cluster") is not None:
        _check_one_cluster()
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


def _check_one_cluster() -> None:
    """Refuse two clusters on the command line; one of a configuration file gives way to `cluster`."""
    typed = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    twice = next((each for each in typed if re.match(r"\+*strategy\.cluster=(?!null)", each)), None)
    if twice is not None:
        raise ConfigError(
            f"{twice} names the devices that cluster=... names, too. Give one of them: cluster=... plans for all "
            "devices of a cluster, strategy.cluster=... for as many of them as the trainer has (trainer.devices)."
        )


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
    devices: Any = trainer.devices
    if isinstance(devices, ListConfig):
        devices = len(devices)
    if str(devices) in ("auto", "-1"):
        raise ConfigError(
            f"trainer.devices={devices}: gpp-plan does not count this machine's devices. Give their number, for "
            "example trainer.devices=4, or name a cluster, for example cluster=dgx_h100."
        )
    if not str(devices).isdecimal() or int(devices) < 1:
        raise ConfigError(
            f"trainer.devices={devices} must be a whole number of 1 or more for gpp-plan, for example "
            "trainer.devices=4."
        )
    number = int(devices) * int(trainer.get("num_nodes", 1))
    if number > MAX_DEVICES:
        raise ConfigError(
            f"trainer.devices={devices} x trainer.num_nodes={trainer.num_nodes} are {number} devices; a cluster has at "
            f"most {MAX_DEVICES}."
        )
    return number
