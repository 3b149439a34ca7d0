"""The report of a pipeline that does not flush: its period, and the delay and memory of every stage."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.plan import Plan
from lightning_gpp.reports.units import duration, size
from lightning_gpp.simulation import Period


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
