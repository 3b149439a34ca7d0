"""How a plan was found: figures of the search, the plans that lost, and several partitioners side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpp.planning import Found
from lightning_gpp.reports.table import markdown
from lightning_gpp.reports.units import count, distance, duration, percent, size


def search_text(found: Found) -> str:
    """The simulated step and its rate, how far from the best possible that may be, and what the search took."""
    answer = found.answer
    lines = [
        f"step: {duration(found.seconds)} simulated, {found.samples_per_second:.4g} samples/s, "
        f"idle {percent(found.timeline.bubble_fraction)}",
        f"partitioner {found.partitioner}: objective {answer.objective:.4g} ({answer.objective_name}), "
        f"{answer.states} states in {duration(found.search_seconds)}",
        _bound(found),
        *answer.notes,
    ]
    return "\n".join(filter(None, lines))


def _bound(found: Found) -> str:
    if found.gap is None:
        return "lower bound: none is known for this plan"
    bound = duration(found.answer.lower_bound)
    gap = f"this step is at most {distance(found.gap)} longer than the best possible one"
    return f"lower bound under {found.plan.schedule}: {bound}; {gap}"


def alternatives_text(found: Found) -> str:
    """The plans that were not chosen, best first, and why; empty where the partitioner names none."""
    if not found.alternatives:
        return ""
    lines = [
        f"  {number}. {duration(entry.seconds)}, {entry.draft}: {entry.reason}"
        for number, entry in enumerate(sorted(found.alternatives, key=lambda entry: entry.seconds), start=1)
    ]
    legend = "(u: units of a stage, x: its devices, r: recomputed, b: micro-batch size)"
    return "\n".join([f"runners-up, as estimated {legend}", *lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one partitioner found, or the reason why it found nothing."""

    partitioner: str
    found: Found | None = None
    reason: str = ""


COMPARED = (
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
"""Stages, depth and samples of a micro-batch are those of one pipeline; the largest peak of a device; seconds of the
search; by how much the step exceeds the partitioner's own lower bound."""


def compare_table(outcomes: Sequence[Outcome]) -> str:
    """One row per partitioner; below, the reasons of those that found nothing."""
    best = max((outcome.found.samples_per_second for outcome in outcomes if outcome.found), default=0.0)
    rows = [_row(outcome.found, best) if outcome.found else _nothing(outcome) for outcome in outcomes]
    reasons = [f"{outcome.partitioner}: {outcome.reason}" for outcome in outcomes if outcome.found is None]
    return "\n".join([*markdown(COMPARED, rows), *([""] if reasons else []), *reasons])


def _row(found: Found, best: float) -> list[str]:
    plan = found.plan
    sizes = sorted({stage.micro_batch_size for stage in plan.stages})
    return [
        found.partitioner,
        str(found.num_pipelines),
        str(len(plan.stages)),
        str(plan.depth),
        "/".join(map(str, sizes)),
        duration(found.seconds),
        f"{found.samples_per_second:.4g}",
        f"{found.samples_per_second / best:.3f}",
        percent(found.timeline.bubble_fraction),
        size(max(found.timeline.peak_bytes)),
        duration(found.search_seconds),
        count(found.answer.states),
        distance(found.gap),
    ]


def _nothing(outcome: Outcome) -> list[str]:
    return [outcome.partitioner, *["-"] * (len(COMPARED) - 1)]
