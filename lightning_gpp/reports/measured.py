"""Comparison of simulated and measured times: of every kind of action, of the step, and idle time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from lightning_gpp.errors import ScheduleError
from lightning_gpp.reports.kinds import computes
from lightning_gpp.reports.tables import markdown
from lightning_gpp.reports.units import duration, percent
from lightning_gpp.schedules import Kind
from lightning_gpp.simulation import Span, Timeline


@dataclass(frozen=True, slots=True)
class FigurePair:
    """A simulated figure and the mean of the measured ones; None if there is none."""

    simulated: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured divided by simulated; None if undefined."""
        if not self.simulated or self.measured is None:
            return None
        return self.measured / self.simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Mean times of computing actions over mini-batches. Collectives and host copies are left out.

    Args:
        stages: names of the stages, by index.
        num_timelines: number of measured timelines.
        actions: seconds of one action, by stage and kind, over all micro-batches and replicas.
        step: seconds from the first start to the last stop.
        bubble: fraction of the step in which a device does not compute; mean over devices.
    """

    stages: tuple[str, ...]
    num_timelines: int
    actions: dict[tuple[int, Kind], FigurePair]
    step: FigurePair
    bubble: FigurePair


def compare_timelines(simulated: Timeline, measured: Sequence[Timeline]) -> Comparison:
    """Compare a simulation with measurements of the same plan.

    Args:
        simulated: timeline of one mini-batch.
        measured: one timeline per mini-batch and pipeline, with the same number of samples.

    Raises:
        ScheduleError: nothing was measured, or the timelines have other stages.
    """
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
    expected, taken = _computing(simulated), [_computing(timeline) for timeline in measured]
    seconds = _seconds([expected]), _seconds(taken)
    keys = sorted(set(seconds[0]) | set(seconds[1]), key=lambda key: (key[0], _ORDER.index(key[1])))
    return Comparison(
        stages=simulated.stages,
        num_timelines=len(measured),
        actions={key: FigurePair(*(means.get(key) for means in seconds)) for key in keys},
        step=FigurePair(expected.makespan, fmean(timeline.makespan for timeline in taken)),
        bubble=FigurePair(expected.bubble_fraction, fmean(timeline.bubble_fraction for timeline in taken)),
    )


_ORDER = list(Kind)


def _computing(timeline: Timeline) -> Timeline:
    """The timeline without collectives and host copies."""
    kept = (tuple(span for span in device if computes(span.action)) for device in timeline.devices)
    return Timeline(stages=timeline.stages, devices=tuple(kept))


def _seconds(timelines: Sequence[Timeline]) -> dict[tuple[int, Kind], float]:
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in _spans(timelines):
        seconds[span.action.stage, span.action.kind].append(span.stop - span.start)
    return {key: fmean(values) for key, values in seconds.items()}


def _spans(timelines: Sequence[Timeline]) -> Iterator[Span]:
    return (span for timeline in timelines for device in timeline.devices for span in device)


HEADER = ("stage", "action", "simulated", "measured", "ratio")


def comparison_text(comparison: Comparison) -> str:
    """A table: one row per stage and kind of action, then the step and its idle part."""
    rows = [
        [f"{stage} {comparison.stages[stage]}", kind.name.lower(), *_cells(pair)]
        for (stage, kind), pair in comparison.actions.items()
    ]
    rows.append(["all", "step", *_cells(comparison.step)])
    bubble = comparison.bubble
    rows.append(["all", "idle", *(percent(value or 0) for value in (bubble.simulated, bubble.measured)), "-"])
    return markdown(HEADER, rows)


def _cells(pair: FigurePair) -> list[str]:
    times = ["-" if value is None else duration(value) for value in (pair.simulated, pair.measured)]
    return [*times, "-" if pair.ratio is None else f"{pair.ratio:.2f}"]
