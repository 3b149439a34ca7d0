"""Compares partitioners, or schedules: one row each; if the user interrupts it, the rows so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, ListConfig

from lightning_gpp.cli.planning import check_outputs, write_outputs
from lightning_gpp.cli.stopping import TimeIsUp, check_interrupted, interruptible, time_limit, uninterrupted
from lightning_gpp.cli.task import Task, applied, predict, task_of
from lightning_gpp.errors import ConfigError, GPPError, PlanError
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction, Request, best_plan, each_schedule, partitioner_names
from lightning_gpp.planning.assignment.layout_check import layout_mismatch
from lightning_gpp.reports import (
    Compared,
    chain_and_graph_svg,
    partitioners_table,
    schedules_table,
    search_progress,
    terminal_width,
)
from lightning_gpp.reports.progress import SearchBar
from lightning_gpp.schedules import schedule_names
from lightning_gpp.training.machine import first
from lightning_gpp.training.planner import check_devices, planned, request_of

PARTITIONERS = partitioner_names()
"""Partitioners to compare by default: all except the one for only a handful of units and devices."""

ComparedRow = tuple[str, Compared]
"""A partitioner or schedule, and its prediction."""

ALL = "all"
"""The value of `schedules` for all registered ones."""


def compare(config: DictConfig) -> None:
    """Print one row per partitioner, or per schedule if `schedules` is given. Ctrl-C ends it with the rows so far.

    Raises:
        ConfigError: the configuration cannot work.
        PlanError: no row has a plan.
        KeyboardInterrupt: it was interrupted.
    """
    if config.schedules is not None and config.partitioners is not None:
        raise ConfigError(
            "Both partitioners and schedules are given: gpp-plan compare has one row per partitioner, or one per "
            "schedule. Give one of them; strategy.partitioner plans for all schedules, strategy.schedule is used by "
            "all partitioners."
        )
    check_outputs(config, ("svg",))
    with interruptible():
        task = task_of(config)
        check_interrupted()
        (_compare_partitioners if config.schedules is None else _compare_schedules)(config, task)
        write_outputs(config, {"svg": lambda path: path.write_text(_chain_and_graph(task))})


def _chain_and_graph(task: Task) -> str:
    """The picture of the task's plan as a chain and as a graph."""
    chain, graph = (
        predict(replace(task, options=replace(task.options, chain_baseline=chained))) for chained in (True, False)
    )
    heading = f"One mini-batch of {graph.plan.batch_size} samples on {task.machine.cluster.name}, simulated"
    return chain_and_graph_svg(chain, graph, heading)


# -- partitioners -----------------------------------------------------------------------------------------------------


def _compare_partitioners(config: DictConfig, task: Task) -> None:
    names = PARTITIONERS if config.partitioners is None else _listed(config.partitioners)
    rows: list[ComparedRow] = []
    unknown = [name for name in names if name not in partitioner_names()]  # the model's module may register one
    if unknown or not names:
        what = f"{unknown[0]!r} in partitioners does not exist" if unknown else "partitioners=[] names none"
        raise ConfigError(f"{what}. Choose some of: {', '.join(partitioner_names())}.")
    if task.options.plan is not None or task.options.stages is not None:
        raise ConfigError(
            "gpp-plan compare runs partitioners: leave out strategy.plan and strategy.stages, or compare schedules on "
            "them with gpp-plan compare schedules=all."
        )
    try:
        for name in names:
            rows.append((name, _partitioned(name, task, float(config.compare_seconds))))
            check_interrupted()
    finally:
        _show(rows, partitioners_table)
    _check_found(rows, "partitioner")


def _show(rows: list[ComparedRow], table: Callable[[list[ComparedRow], int], str]) -> None:
    if rows:
        with uninterrupted():
            print(table(rows, terminal_width()))


def _check_found(rows: list[ComparedRow], what: str) -> None:
    if all(isinstance(found, str) for _, found in rows):
        raise PlanError(f"No {what} has a plan; the table says why.")


def _partitioned(name: str, task: Task, seconds: float) -> Compared:
    try:
        with time_limit(seconds, key="compare_seconds"), search_progress() as progress:
            return best_plan(name, task.subject.step.graph, in_time(_request(task, progress), seconds))
    except PlanError as error:
        return str(error)
    except TimeIsUp:
        return _late(seconds)


def _request(task: Task, progress: SearchBar | None) -> Request:
    machine = first(task.machine, task.num_devices * (task.num_pipelines or 1))
    return request_of(
        task.subject.step,
        task.options,
        machine,
        num_pipelines=task.num_pipelines,
        progress=progress,
    )


def in_time(request: Request, seconds: float) -> Request:
    """The request with a search that ends early enough for an answer."""
    return replace(request, seconds=min(request.seconds, 0.6 * seconds))


def _late(seconds: float) -> str:
    return f"no plan after compare_seconds={seconds:g} seconds. Raise it."


# -- schedules --------------------------------------------------------------------------------------------------------


def _compare_schedules(config: DictConfig, task: Task) -> None:
    rows: list[ComparedRow] = []
    names, seconds = schedules_wanted(config.schedules), float(config.compare_seconds)
    given = task.options.plan is not None or task.options.stages is not None
    try:
        for row in _on_given(task, names, seconds) if given else _searched(task, names, seconds):
            rows.append(row)
            check_interrupted()
    finally:
        _show(rows, schedules_table)
    _check_found(rows, "schedule")


def schedules_wanted(setting: Any) -> tuple[str, ...]:
    """The schedules that `schedules` names: one, several, or all.

    Raises:
        ConfigError: one of them does not exist, or there is none.
    """
    listed = _listed(setting)
    names = schedule_names() if listed == (ALL,) else listed
    unknown = [name for name in names if name not in schedule_names()]
    if unknown or not names:
        what = f"{unknown[0]!r} in schedules does not exist" if unknown else "schedules=[] names none"
        raise ConfigError(f"{what}. Choose {ALL}, or some of: {', '.join(schedule_names())}.")
    return names


def _listed(setting: Any) -> tuple[str, ...]:
    """The different names of a setting, which may be a single one."""
    return tuple(dict.fromkeys(map(str, setting if isinstance(setting, ListConfig | list | tuple) else [setting])))


def _searched(task: Task, names: Sequence[str], seconds: float) -> Iterator[ComparedRow]:
    """Each schedule with its best plan. A search that takes too long is abandoned for the next one."""
    search = None
    with search_progress() as progress:
        request = _request(task, progress)
        for index, name in enumerate(names):
            if progress is not None:
                progress.part(index, len(names), name)
            rest = replace(request, schedules=tuple(names[index:]))
            search = search or each_schedule(task.options.partitioner, task.subject.step.graph, rest)
            outcome: Compared
            try:
                with time_limit(seconds, key="compare_seconds"):
                    outcome = _text_of_error(next(search)[1])
            except GPPError as error:
                outcome = str(error)
            except TimeIsUp:
                search, outcome = None, _late(seconds)
            yield name, outcome


def _text_of_error(outcome: Prediction | GPPError) -> Compared:
    return str(outcome) if isinstance(outcome, GPPError) else outcome


def _on_given(task: Task, names: Sequence[str], seconds: float) -> Iterator[ComparedRow]:
    """Each schedule on the user's plan or stages."""
    with search_progress() as progress:
        for index, name in enumerate(names):
            if progress is not None:
                progress.part(index, len(names), name)
            try:
                with time_limit(seconds, key="compare_seconds"):
                    outcome = _applied(task, name)
            except GPPError as error:
                outcome = str(error)
            except TimeIsUp:
                outcome = _late(seconds)
            yield name, outcome


def _applied(task: Task, name: str) -> Compared:
    subject, machine = task.subject.step, task.machine
    plan = planned(subject, replace(task.options, schedule=name), lambda: machine, task.num_devices).plan
    lack = _lack(task, plan)
    if lack:
        return lack
    check_devices(plan, task.num_devices)
    return replace(applied(task, plan), note=_layout_note(plan, name))


def _layout_note(plan: Plan, name: str) -> str:
    """Note for a row whose schedule runs on a layout it was not made for."""
    reason = layout_mismatch(plan, name)
    return reason and f"{reason} The row shows strategy.schedule={name} with this layout."


def _lack(task: Task, plan: Plan) -> str:
    """Why stages without devices do not fill the machine; empty if they do."""
    if task.options.plan is not None or plan.num_devices == task.num_devices:
        return ""
    return (
        f"it lays the stages out over {plan.num_devices} devices, but there are {task.num_devices}. Give more stages "
        "(strategy.stages), or strategy.stages_per_device for all schedules."
    )
