"""Comparison of partitioners, or of schedules: one row for the prediction of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.schedule import DeviceFigures, device_figures
from lightning_gpp.reports.table import chosen, kept_columns
from lightning_gpp.reports.terminal import wrapped
from lightning_gpp.reports.units import count, distance, duration, percent, rate, size

Compared = Prediction | str
"""A prediction, or the reason why there is none."""

PARTITIONERS: Final = (
    "partitioner",
    "pipelines",
    "stages",
    "depth",
    "micro-batch",
    "step",
    "samples/s",
    "of the best",
    "idle",
    "peak memory",
    "search",
    "states",
    "gap",
)
"""Stages, depth and micro-batch size (samples) are those of one pipeline, peak memory that of the device with the
highest, "search" its duration. "of the best" is the throughput relative to the highest among those that fit the memory,
"gap" the distance of the step time from the partitioner's lower bound. Without a flush the period replaces the step.
"""

SCHEDULES: Final = (
    "schedule",
    "stages per device",
    "pipelines",
    "micro-batches",
    "step",
    "samples/s",
    "of the best",
    "gap",
    "bubble",
    "peak memory",
    "in flight",
    "messages",
    "unshards/reductions",
)
"""The gap is the distance from a step in which all devices are always busy, the bubble a mean over the devices. The
other columns show the device with the most: micro-batches in flight, over all its stages; messages of one mini-batch,
sent and received, with their bytes; all-gathers of parameters and reductions of gradients.
"""


IMPORTANCE: Final = (
    *("step", "of the best", "idle", "bubble", "peak memory", "samples/s", "gap", "micro-batch", "micro-batches"),
    *("stages", "depth", "pipelines", "in flight", "stages per device", "search", "messages", "states"),
    "unshards/reductions",
)
"""The columns of both, after the first, in the order in which they keep their place in a narrow table."""


def partitioners_table(outcomes: Sequence[tuple[str, Compared]], width: int | None = None) -> str:
    """One row per partitioner; below, the reasons of those that found no plan.

    Args:
        outcomes: names and predictions.
        width: characters of a line; columns that have no place are left out, and named below.
    """
    return _table(PARTITIONERS, outcomes, _partitioner, width)


def schedules_table(outcomes: Sequence[tuple[str, Compared]], width: int | None = None) -> str:
    """One row per schedule; below, the reasons of those that have no plan, and notes on others.

    Args:
        outcomes: names and predictions.
        width: characters of a line; columns that have no place are left out, and named below.
    """
    return _table(SCHEDULES, outcomes, _schedule, width)


def _table(
    header: Sequence[str],
    outcomes: Sequence[tuple[str, Compared]],
    cells: Callable[[Prediction, str], list[str]],
    width: int | None,
) -> str:
    predictions = [outcome for _, outcome in outcomes if isinstance(outcome, Prediction)]
    if any(entry.period is not None for entry in predictions):
        header = ["period" if name == "step" else name for name in header]
    best = max((entry.samples_per_second for entry in predictions if not entry.excess_bytes), default=0.0)

    def row(name: str, outcome: Compared) -> list[str]:
        if isinstance(outcome, str):
            return [name, *["-"] * (len(header) - 1)]
        return [name, *cells(outcome, f"{outcome.samples_per_second / best:.3f}" if best else "-")]

    remarks = [(name, outcome if isinstance(outcome, str) else outcome.note) for name, outcome in outcomes]
    rows = [row(*entry) for entry in outcomes]
    kept = kept_columns(header, rows, [header[0], *(name for name in IMPORTANCE if name in header)], width)
    left_out = ", ".join(name for column, name in enumerate(header) if column not in kept)
    below = [f"{name}: {remark}" for name, remark in remarks if remark]
    below += [f"Left out at {width} columns (set COLUMNS for more): {left_out}."] if left_out else []
    lines = below if width is None else [wrapped(line, width) for line in below]
    return "\n".join([*chosen(header, rows, kept, width), *([""] if lines else []), *lines])


def _partitioner(prediction: Prediction, ratio: str) -> list[str]:
    plan, search = prediction.plan, prediction.search
    return [
        str(prediction.num_pipelines),
        str(len(plan.stages)),
        str(plan.depth),
        _range(stage.micro_batch_size for stage in plan.stages),
        duration(prediction.seconds),
        rate(prediction.samples_per_second),
        ratio,
        percent(prediction.idle),
        _memory(prediction),
        duration(search.seconds) if search else "-",
        count(search.states) if search else "-",
        distance(prediction.gap),
    ]


def _schedule(prediction: Prediction, ratio: str) -> list[str]:
    plan = prediction.plan
    return [
        _range(len(plan.stages_on(device)) for device in range(plan.num_devices)),
        str(prediction.num_pipelines),
        _range(len(plan.intervals(stage)) for stage in range(len(plan.stages))),
        duration(prediction.seconds),
        rate(prediction.samples_per_second),
        ratio,
        distance(prediction.gap),
        percent(prediction.idle),
        _memory(prediction),
        *_most(device_figures(prediction)),
    ]


def _memory(prediction: Prediction) -> str:
    excess = prediction.excess_bytes
    return size(max(prediction.peak_bytes)) + (f", {size(excess)} TOO MUCH" if excess else "")


def _most(figures: Sequence[DeviceFigures]) -> tuple[str, str, str]:
    messages = max(entry.traffic.messages for entry in figures)
    num_bytes = max(entry.traffic.num_bytes for entry in figures)
    return (
        str(max(entry.in_flight for entry in figures)),
        f"{messages} ({size(num_bytes)})" if messages else "0",
        f"{max(entry.unshards for entry in figures)}/{max(entry.reductions for entry in figures)}",
    )


def _range(numbers: Iterable[int]) -> str:
    return "/".join(map(str, sorted(set(numbers))))
