"""Comparison of partitioners, or of schedules: one row for the prediction of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.devices import devices_in_flight
from lightning_gpp.reports.terminal import markdown, wrapped
from lightning_gpp.reports.units import distance, duration, percent, rate, size

Compared = Prediction | str
"""A prediction, or the reason why there is none."""

HEADER: Final = (
    *("pipelines", "stages", "micro-batches", "step", "samples/s", "of the best", "gap", "idle"),
    *("peak memory", "in flight", "search"),
)
"""Stages and micro-batches are those of one pipeline; peak memory and micro-batches in flight those of the device with
the most, "search" its duration. "of the best" is the throughput relative to the highest among those that fit the
memory, "gap" the distance of the step time from a lower bound. Without a flush the period replaces the step.
"""


def comparison_table(what: str, outcomes: Sequence[tuple[str, Compared]], width: int | None = None) -> str:
    """One row per outcome; below, the reasons of those that have no plan, and notes on others.

    Args:
        what: header of the first column.
        outcomes: names and predictions.
        width: characters of a line.
    """
    predictions = [outcome for _, outcome in outcomes if isinstance(outcome, Prediction)]
    without_flush = any(entry.period is not None for entry in predictions)
    header = [what, *("period" if name == "step" and without_flush else name for name in HEADER)]
    best = max((entry.samples_per_second for entry in predictions if not entry.excess_bytes), default=0.0)
    rows = [[name, *_cells(outcome, best)] for name, outcome in outcomes]
    remarks = [(name, outcome if isinstance(outcome, str) else outcome.note) for name, outcome in outcomes]
    below = [f"{name}: {remark}" for name, remark in remarks if remark]
    lines = below if width is None else [wrapped(line, width) for line in below]
    return "\n".join([markdown(header, rows, width), *([""] if lines else []), *lines])


def _cells(outcome: Compared, best: float) -> list[str]:
    if isinstance(outcome, str):
        return ["-"] * len(HEADER)
    plan, search, excess = outcome.plan, outcome.search, outcome.excess_bytes
    return [
        str(outcome.num_pipelines),
        str(len(plan.stages)),
        _range(len(plan.intervals(stage)) for stage in range(len(plan.stages))),
        duration(outcome.seconds),
        rate(outcome.samples_per_second),
        f"{outcome.samples_per_second / best:.3f}" if best else "-",
        distance(outcome.gap),
        percent(outcome.idle),
        size(max(outcome.peak_bytes)) + (f", {size(excess)} TOO MUCH" if excess else ""),
        str(max(devices_in_flight(outcome))),
        duration(search.seconds) if search else "-",
    ]


def _range(numbers: Iterable[int]) -> str:
    return "/".join(map(str, sorted(set(numbers))))
