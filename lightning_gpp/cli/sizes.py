"""The numbers of processes per device that `gpp-plan` compares with `strategy.tensor_parallel_size=auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from omegaconf import DictConfig, open_dict

from lightning_gpp.cli.task import Task, predict, task_of
from lightning_gpp.errors import ConfigError, GPPError, PlanError
from lightning_gpp.plan import Plan
from lightning_gpp.planning import SIZES, Prediction, SizesFound, best_sizes
from lightning_gpp.reports import search_progress
from lightning_gpp.reports.units import rate
from lightning_gpp.training.measured.machine import first
from lightning_gpp.training.option_values import AUTO
from lightning_gpp.training.planner import request_of
from lightning_gpp.training.whole.whole_step import noted_whole


def best_of_sizes(config: DictConfig) -> tuple[Task, Prediction, list[str]]:
    """The task and its plan; with `strategy.tensor_parallel_size=auto` the fastest for any number of processes per
    device, and a comparison.

    Raises:
        ConfigError, PlanError: there is no plan with one process per device, nor with more.
    """
    if config.strategy.get("tensor_parallel_size") != AUTO or config.strategy.get("plan") is not None:
        task = task_of(config)
        return task, predict(task), []
    if config.strategy.get("stages") is not None:
        raise ConfigError(
            "strategy.tensor_parallel_size=auto is for a search; with strategy.stages give a number, such as "
            "strategy.tensor_parallel_size=2."
        )
    tasks, failures = _tasks(config)
    found = _searched(tasks)
    found = replace(found, failures={**found.failures, **failures})
    plan = noted_whole(found.prediction.plan, tasks[1].subject.whole)
    return tasks[1], replace(found.prediction, plan=plan), [_compared(found)]


def _tasks(config: DictConfig) -> tuple[dict[int, Task], dict[int, GPPError]]:
    """The tasks with each number of processes per device, and the reason why there is none with the first that fails:
    what cannot be divided among so many, cannot among more.

    Raises:
        ConfigError: there is none with one process.
    """
    tasks = {1: task_of(_of_size(config, 1))}
    for number in SIZES[1:]:
        try:
            tasks[number] = task_of(_of_size(config, number))
        except GPPError as error:
            return tasks, {number: error}
    return tasks, {}


def _of_size(config: DictConfig, number: int) -> DictConfig:
    config = config.copy()
    with open_dict(config):
        config.strategy.tensor_parallel_size = number
    return config


def _searched(tasks: Mapping[int, Task]) -> SizesFound:
    """The plans that partitioners find; searches share the time."""
    task, graphs = tasks[1], {number: each.subject.graph for number, each in tasks.items()}
    with search_progress() as progress:
        request = request_of(
            task.subject.step,
            task.options,
            first(task.machine, task.num_devices * (task.num_pipelines or 1)),
            num_pipelines=task.num_pipelines,
            progress=progress,
        )
        models = {number: each.subject.step.fingerprint for number, each in tasks.items()}
        return best_sizes(task.options.partitioner, request, graphs, models)


def _compared(found: SizesFound) -> str:
    """The throughput with each number of processes per device."""
    rates = {str(number): plan for number, plan in found.plans.items()}
    rows = [f"{name}: {rate(plan.samples_per_second)} samples/s" for name, plan in rates.items()]
    for number, error in found.failures.items():
        rows.append(f"{number}: no plan" if isinstance(error, PlanError) else f"{number}: not possible. {error}")
    fastest = found.prediction.plan.stages[0].tensor_parallel_size
    return f"Fastest: strategy.tensor_parallel_size={fastest}. {'; '.join(rows)}"


def sizes_of(plan: Plan) -> list[int]:
    """The numbers of processes that devices of a plan have."""
    return sorted({stage.tensor_parallel_size for stage in plan.stages})
