"""The text of a prediction: all of it, or the part that is kept in a run folder."""

from __future__ import annotations

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.graph import graph_text
from lightning_gpp.reports.memory import memory_text
from lightning_gpp.reports.period import period_text
from lightning_gpp.reports.schedule import device_figures, schedule_text
from lightning_gpp.reports.search import search_text
from lightning_gpp.reports.table import plan_table
from lightning_gpp.reports.timeline import WIDTH, timeline_text


def prediction_text(prediction: Prediction, width: int | None = None) -> str:
    """Plan, stage graph, timeline, memory, devices, search and period, separated by empty lines.

    Args:
        prediction: the plan and its simulated step.
        width: characters of a line; None: as many as the tables need.
    """
    plan, timeline = prediction.plan, prediction.drawn
    sections = (
        plan_table(plan, width=width, flights=prediction.in_flight),
        graph_text(plan, width),
        timeline_text(timeline, width or WIDTH),
        memory_text(prediction, width),
        schedule_text(device_figures(prediction), width),
        search_text(prediction, width),
        _period(prediction),
    )
    return "\n\n".join(filter(None, sections))


def run_text(prediction: Prediction) -> str:
    """Plan, timeline and period."""
    table = plan_table(prediction.plan, flights=prediction.in_flight)
    sections = table, timeline_text(prediction.drawn), _period(prediction)
    return "\n\n".join(filter(None, sections))


def _period(prediction: Prediction) -> str:
    return "" if prediction.period is None else period_text(prediction.plan, prediction.period)
