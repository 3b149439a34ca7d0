"""The text of a prediction: all of it, or the part that is kept in a run folder."""

from __future__ import annotations

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.graph import graph_text
from lightning_gpp.reports.memory import memory_text
from lightning_gpp.reports.schedule import device_figures, schedule_text
from lightning_gpp.reports.search import search_text
from lightning_gpp.reports.table import plan_table
from lightning_gpp.reports.timeline import timeline_text


def prediction_text(prediction: Prediction) -> str:
    """Plan, stage graph, timeline, memory, devices and search, separated by empty lines."""
    plan, timeline = prediction.plan, prediction.timeline
    sections = (
        plan_table(plan),
        graph_text(plan),
        timeline_text(timeline),
        memory_text(prediction),
        schedule_text(device_figures(prediction)),
        search_text(prediction),
    )
    return "\n\n".join(filter(None, sections))


def run_text(prediction: Prediction) -> str:
    """Plan and timeline."""
    return f"{plan_table(prediction.plan)}\n\n{timeline_text(prediction.timeline)}"
