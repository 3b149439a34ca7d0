"""Comparison of simulated and measured times: of every kind of action, of the step, and idle time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Final

from lightning_gpp.errors import ScheduleError
from lightning_gpp.reports.terminal import markdown
from lightning_gpp.reports.timeline import computes
from lightning_gpp.reports.units import duration, percent
from lightning_gpp.schedules import Kind
from lightning_gpp.simulation import Timeline

HEADER: Final = ("stage", "action", "simulated", "measured", "ratio")

_ORDER: Final = list(Kind)


def comparison_text(simulated: Timeline, measured: Sequence[Timeline]) -> str:
    """A table of mean seconds: one row per stage and kind of action, then the step and its idle part.

    Collectives and host copies are left out, and so the step ends with the last computing action.

    Args:
        simulated: timeline of one mini-batch.
        measured: one timeline per mini-batch and pipeline of the same plan, with the same number of samples.

    Raises:
        ScheduleError: nothing was measured, or the timelines have other stages.
    """
    _check(simulated, measured)
    expected, taken = _computing(simulated), [_computing(timeline) for timeline in measured]
    simulated_means, means = _action_seconds([expected]), _action_seconds(taken)
    rows = [
        [f"{stage} {simulated.stages[stage]}", kind.name.lower(), *_cells(simulated_means.get(key), means.get(key))]
        for key in sorted({**simulated_means, **means}, key=lambda key: (key[0], _ORDER.index(key[1])))
        for stage, kind in [key]
    ]
    rows.append(["all", "step", *_cells(expected.makespan, fmean(timeline.makespan for timeline in taken))])
    idle = expected.bubble_fraction, fmean(timeline.bubble_fraction for timeline in taken)
    rows.append(["all", "idle", *map(percent, idle), "-"])
    return markdown(HEADER, rows)


def _check(simulated: Timeline, measured: Sequence[Timeline]) -> None:
    for timeline in measured:
        if timeline.stages != simulated.stages:
            raise ScheduleError(
                f"A timeline of the stages {list(timeline.stages)} cannot be compared with a simulation of the stages "
                f"{list(simulated.stages)}. Take both from one plan."
            )
    if not measured:
        raise ScheduleError(
            "No mini-batch of the plan's size was measured. Train on at least one with strategy.trace=true."
        )


def _computing(timeline: Timeline) -> Timeline:
    """The timeline without collectives and host copies."""
    kept = (tuple(span for span in device if computes(span.action)) for device in timeline.devices)
    return Timeline(stages=timeline.stages, devices=tuple(kept))


def _action_seconds(timelines: Sequence[Timeline]) -> dict[tuple[int, Kind], float]:
    """Mean seconds of an action by stage and kind, over all micro-batches and replicas."""
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in (span for timeline in timelines for device in timeline.devices for span in device):
        seconds[span.action.stage, span.action.kind].append(span.stop - span.start)
    return {key: fmean(values) for key, values in seconds.items()}


def _cells(simulated: float | None, measured: float | None) -> list[str]:
    times = ["-" if value is None else duration(value) for value in (simulated, measured)]
    return [*times, f"{measured / simulated:.2f}" if simulated and measured is not None else "-"]
