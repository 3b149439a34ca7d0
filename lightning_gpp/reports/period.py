"""The report of a pipeline that does not flush: its period, and the delay and memory of every stage."""

from __future__ import annotations

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
    if period.delays:
        lines.append("Delays, in optimizer steps between a forward and its backward:")
    for index, delay in period.delays.items():
        stage, kept = plan.stages[index], period.copies[index]
        memory = size(kept * stage.figures.parameter_bytes)
        copied = f"{kept} more {'copy' if kept == 1 else 'copies'} of its weights ({memory})" if kept else "no copy"
        lines.append(f"  {index} {stage.name}: {delay}, {copied}")
    return "\n".join(lines)
