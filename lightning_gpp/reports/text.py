"""A prediction as text, for the terminal, the run folder and the page: its tables, its search, and its period."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction
from lightning_gpp.reports.devices import devices_text
from lightning_gpp.reports.graph import graph_text
from lightning_gpp.reports.table import plan_table
from lightning_gpp.reports.terminal import wrapped
from lightning_gpp.reports.timeline import WIDTH, timeline_text
from lightning_gpp.reports.units import distance, duration, percent, rate, size
from lightning_gpp.simulation import Period

LEGEND: Final = (
    "u: units of a stage, x: its devices, r: recomputed, r3: 3 blocks of it, o: offloaded, "
    "+: slack, b: micro-batch size"
)
"""The letters in the descriptions of runners-up."""


def prediction_text(prediction: Prediction, width: int | None = None) -> str:
    """Plan, stage graph, timeline, devices, search and period, separated by empty lines.

    Args:
        prediction: the plan and its simulated step.
        width: characters of a line; None: as many as the tables need.
    """
    drawn = graph_text(prediction.plan, width), timeline_text(prediction.drawn, width or WIDTH)
    table, *others = _figures(prediction, width)
    return "\n\n".join(filter(None, [table, *drawn, *others]))


def figures_text(prediction: Prediction) -> str:
    """The same without what pictures show."""
    return "\n\n".join(filter(None, _figures(prediction, None)))


def _figures(prediction: Prediction, width: int | None) -> list[str]:
    period = prediction.period
    return [
        plan_table(prediction.plan, width=width, flights=prediction.in_flight),
        devices_text(prediction, width),
        search_text(prediction, width),
        "" if period is None else period_text(prediction.plan, period),
    ]


def search_text(prediction: Prediction, width: int | None = None) -> str:
    """Step time or period, throughput, effort of the search, lower bound and runners-up; empty without a search.

    Args:
        prediction: the plan and its search.
        width: characters of a line, longer ones are broken; None: any number.
    """
    search = prediction.search
    if search is None:
        return ""
    kind = "step" if prediction.period is None else "period"
    lines = (
        f"{kind}: {duration(prediction.seconds)} simulated, {rate(prediction.samples_per_second)} samples/s, "
        f"idle {percent(prediction.idle)}",
        f"partitioner {search.partitioner}: objective {search.objective:.4g} ({search.objective_name}), "
        f"{search.states} states in {duration(search.seconds)}",
        _bound(prediction, kind),
        *search.notes,
        _alternatives(prediction),
    )
    text = "\n".join(filter(None, lines))
    return text if width is None else "\n".join(wrapped(line, width) for line in text.splitlines())


def _bound(prediction: Prediction, kind: str) -> str:
    if prediction.gap is None:
        return "lower bound: none is known for this plan"
    bound, gap = duration(prediction.lower_bound), distance(prediction.gap)
    return (
        f"lower bound, with all devices busy all the time: {bound}; this {kind} is at most {gap} longer than the best "
        "possible one"
    )


def _alternatives(prediction: Prediction) -> str:
    """The plans that were not chosen, best first, with the reasons; empty if the partitioner names none."""
    if not prediction.alternatives:
        return ""
    lines = [
        f"  {number}. {duration(entry.seconds)}, {entry.draft}{f': {entry.reason}' if entry.reason else ''}"
        for number, entry in enumerate(sorted(prediction.alternatives, key=lambda entry: entry.seconds), start=1)
    ]
    return "\n".join([f"runners-up, as estimated ({LEGEND})", *lines])


def period_text(plan: Plan, period: Period) -> str:
    """Seconds per mini-batch with and without a flush, and a line for every stage.

    Args:
        plan: the plan of the pipeline.
        period: its simulated period.
    """
    lines = [
        f"Without a flush: {duration(period.seconds)} per mini-batch, {duration(period.fill_and_drain)} to fill "
        f"and drain; with a flush after each: {duration(period.flushed)}.",
    ]
    lines += [tied_text(plan, period, group) for group in period.tied]
    if period.delays:
        lines.append("Delays, in optimizer steps between a forward and its backward:")
    for index, delay in period.delays.items():
        stage, kept = plan.stages[index], period.copies[index]
        memory = size(kept * stage.figures.parameter_bytes)
        copied = f"{kept} more {'copy' if kept == 1 else 'copies'} of its weights ({memory})" if kept else "no copy"
        lines.append(f"  {index} {stage.name}: {delay}, {copied}")
    return "\n".join(lines)


def tied_text(plan: Plan, period: Period, group: Sequence[int]) -> str:
    """A sentence on stages that share weights, with a remedy."""
    names = ", ".join(repr(plan.stages[stage].name) for stage in group)
    return (
        f"The stages {names} share weights, so their devices wait for each other before every update; without that a "
        f"mini-batch would take {duration(period.untied)}. On one device they do not wait: give them the same in "
        "strategy.stages, or choose strategy.schedule=zbv, where the first and the last stage are on one device."
    )
