"""The numbers of processes per device that `gpp-plan` compares with `strategy.tensor_parallel_size=auto`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from omegaconf import DictConfig, open_dict

from lightning_gpp.cli.task import Task, predict, task_of
from lightning_gpp.errors import ConfigError, GPPError, PlanError
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction
from lightning_gpp.reports.units import rate
from lightning_gpp.training.option_values import AUTO

SIZES: Final = (1, 2, 4, 8)
"""Numbers of processes per device that are compared."""


def best_of_sizes(config: DictConfig) -> tuple[Task, Prediction, list[str]]:
    """The task and its plan; with `strategy.tensor_parallel_size=auto` the fastest for any number of processes per
    device, and a comparison. The searches share the time.

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
    found, failures = _compared(config)
    if not found:
        raise next(iter(failures.values()))
    best = min(found, key=lambda number: found[number][1].rank)
    task, prediction = found[best]
    bound = min(each.lower_bound for _, each in found.values())
    rows = [f"{number}: {rate(each.samples_per_second)} samples/s" for number, (_, each) in found.items()]
    for number, error in failures.items():
        rows.append(f"{number}: no plan" if isinstance(error, PlanError) else f"{number}: not possible. {error}")
    note = f"Fastest: strategy.tensor_parallel_size={best}. {'; '.join(rows)}"
    return task, replace(prediction, lower_bound=bound), [note]


def _compared(config: DictConfig) -> tuple[dict[int, tuple[Task, Prediction]], dict[int, GPPError]]:
    """The plans with each number, and the reasons why there are none, up to the first that is not possible: what cannot
    be divided among so many, cannot among more.
    """
    found, failures = dict[int, tuple[Task, Prediction]](), dict[int, GPPError]()
    for number in SIZES:
        try:
            task = task_of(_of_size(config, number))
            found[number] = task, predict(task)
        except PlanError as error:
            failures[number] = error
        except GPPError as error:
            failures[number] = error
            break
    return found, failures


def _of_size(config: DictConfig, number: int) -> DictConfig:
    config = config.copy()
    with open_dict(config):
        config.strategy.tensor_parallel_size = number
        config.strategy.search_seconds /= len(SIZES)
    return config


def sizes_of(plan: Plan) -> list[int]:
    """The numbers of processes that devices of a plan have."""
    return sorted({stage.tensor_parallel_size for stage in plan.stages})
