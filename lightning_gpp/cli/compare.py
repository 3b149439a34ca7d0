"""Compares partitioners, or schedules: one row each; if the user interrupts it, the rows so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from omegaconf import DictConfig, ListConfig

from lightning_gpp.cli.task import Task, predict, task_of
from lightning_gpp.errors import ConfigError, GPPError, PlanError
from lightning_gpp.planning import partitioner_names
from lightning_gpp.planning.assignment.layout import layout_mismatch
from lightning_gpp.reports import Compared, comparison_table, terminal_width
from lightning_gpp.schedules import schedule_names

ALL: Final = "all"
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
    task, rows = task_of(config), list[tuple[str, Compared]]()
    what, names = ("schedule", _schedules(config)) if config.schedules is not None else _partitioners(config, task)
    try:
        for name in names:
            rows.append((name, _outcome(task, what, name)))
    finally:
        if rows:
            print(comparison_table(what, rows, terminal_width()))
    if all(isinstance(found, str) for _, found in rows):
        raise PlanError(f"No {what} has a plan; the table says why.")


def _partitioners(config: DictConfig, task: Task) -> tuple[str, Sequence[str]]:
    if task.options.plan is not None or task.options.stages is not None:
        raise ConfigError(
            "gpp-plan compare runs partitioners: leave out strategy.plan and strategy.stages, or compare schedules on "
            "them with gpp-plan compare schedules=all."
        )
    known = partitioner_names()
    return "partitioner", known if config.partitioners is None else _known("partitioners", config.partitioners, known)


def _schedules(config: DictConfig) -> Sequence[str]:
    names = schedule_names()
    return names if config.schedules == ALL else _known("schedules", config.schedules, names)


def _known(key: str, setting: Any, known: Sequence[str]) -> Sequence[str]:
    """The different names of a setting, which may be a single one.

    Raises:
        ConfigError: one of them does not exist, or there is none.
    """
    names = tuple(dict.fromkeys(map(str, setting if isinstance(setting, ListConfig) else [setting])))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"{unknown[0]!r} in {key} does not exist" if unknown else f"{key}=[] names none"
        raise ConfigError(f"{what}. Choose some of: {', '.join(known)}.")
    return names


def _outcome(task: Task, what: str, name: str) -> Compared:
    """The prediction with another partitioner or schedule, or why there is none."""
    options = task.options
    try:
        other = replace(options, schedule=name) if what == "schedule" else replace(options, partitioner=name)
        prediction = predict(replace(task, options=other))
    except GPPError as error:
        return str(error)
    reason = layout_mismatch(prediction.plan, name) if what == "schedule" else ""
    return replace(prediction, note=reason)
