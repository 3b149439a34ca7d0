"""A prediction as text: for the terminal, the run folder and the page."""

from __future__ import annotations

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.devices import device_figures, devices_text
from lightning_gpp.reports.graph import graph_text
from lightning_gpp.reports.period import period_text
from lightning_gpp.reports.search import search_text
from lightning_gpp.reports.table import plan_table
from lightning_gpp.reports.timeline import WIDTH, timeline_text


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
        devices_text(device_figures(prediction), width),
        search_text(prediction, width),
        "" if period is None else period_text(prediction.plan, period),
    ]
