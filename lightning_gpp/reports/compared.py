"""Schedules side by side, each with its plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_gpp.plan import Plan
from lightning_gpp.reports.schedule import DeviceFigures, schedule_figures
from lightning_gpp.reports.table import markdown
from lightning_gpp.reports.units import distance, duration, percent, size
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A plan in the order of its schedule.

    Args:
        plan: of one pipeline.
        num_pipelines: copies of it that share the work.
        timeline: simulated, with what all copies do together.
        memory_bytes: limit of every device of the pipeline.
        note: what there is to say of it, below the table.
        gap: by how much the step may exceed the best possible one under its schedule; None if not known.
    """

    plan: Plan
    num_pipelines: int
    timeline: Timeline
    memory_bytes: tuple[float, ...]
    note: str = ""
    gap: float | None = None

    @property
    def samples_per_second(self) -> float:
        return self.plan.batch_size * self.num_pipelines / self.timeline.makespan

    @property
    def excess_bytes(self) -> float:
        """By how much the device that lacks most exceeds its memory; 0 where all fit."""
        pairs = zip(self.timeline.peak_bytes, self.memory_bytes, strict=True)
        return max(0.0, *(peak - limit for peak, limit in pairs))


SCHEDULES = (
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
    "gathers/sums",
)
"""Of the best: of the most samples per second among those that fit the memory. Gap: distance from a lower bound on
all plans under the schedule. Bubble: mean over devices. The others
are those of the device with the most: micro-batches in flight, of all its stages; messages of one mini-batch, sent and
received, and their bytes; gatherings of parameters and sums of gradients."""


def schedules_table(outcomes: Sequence[tuple[str, Scheduled | str]]) -> str:
    """One row per schedule; below, the reasons of those that have no plan, and notes on others.

    Args:
        outcomes: names, each with its plan, or why it has none.
    """
    found = [outcome for _, outcome in outcomes if isinstance(outcome, Scheduled)]
    best = max((entry.samples_per_second for entry in found if not entry.excess_bytes), default=0.0)
    rows = [_row(name, outcome, best) for name, outcome in outcomes]
    said = [(name, outcome if isinstance(outcome, str) else outcome.note) for name, outcome in outcomes]
    below = [f"{name}: {words}" for name, words in said if words]
    return "\n".join([*markdown(SCHEDULES, rows), *([""] if below else []), *below])


def _row(name: str, outcome: Scheduled | str, best: float) -> list[str]:
    if isinstance(outcome, str):
        return [name, *["-"] * (len(SCHEDULES) - 1)]
    plan, rate = outcome.plan, outcome.samples_per_second
    return [
        name,
        _range(len(plan.stages_on(device)) for device in range(plan.num_devices)),
        str(outcome.num_pipelines),
        _range(len(plan.intervals(stage)) for stage in range(len(plan.stages))),
        duration(outcome.timeline.makespan),
        f"{rate:.4g}",
        f"{rate / best:.3f}" if best else "-",
        distance(outcome.gap),
        percent(outcome.timeline.bubble_fraction),
        _memory(outcome),
        *_most(schedule_figures(compile_program(plan, copies=outcome.num_pipelines), outcome.timeline)),
    ]


def _memory(outcome: Scheduled) -> str:
    lacking = outcome.excess_bytes
    return size(max(outcome.timeline.peak_bytes)) + (f", {size(lacking)} TOO MUCH" if lacking else "")


def _most(figures: Sequence[DeviceFigures]) -> tuple[str, str, str]:
    messages = max(entry.traffic.messages for entry in figures)
    num_bytes = max(entry.traffic.num_bytes for entry in figures)
    return (
        str(max(entry.in_flight for entry in figures)),
        f"{messages} ({size(num_bytes)})" if messages else "0",
        f"{max(entry.gathers for entry in figures)}/{max(entry.sums for entry in figures)}",
    )


def _range(numbers: Iterable[int]) -> str:
    return "/".join(map(str, sorted(set(numbers))))
