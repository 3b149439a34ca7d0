"""Reports for people: tables, text and pictures of plans and timelines."""

from lightning_gpp.reports.graph import graph_svg, graph_text
from lightning_gpp.reports.report import period_text, prediction_text, search_text
from lightning_gpp.reports.tables import Compared, comparison_table, comparison_text, devices_text, plan_table
from lightning_gpp.reports.terminal import terminal_width
from lightning_gpp.reports.timeline import timeline_svg, timeline_text

__all__ = [
    "Compared",
    "comparison_table",
    "comparison_text",
    "devices_text",
    "graph_svg",
    "graph_text",
    "period_text",
    "plan_table",
    "prediction_text",
    "search_text",
    "terminal_width",
    "timeline_svg",
    "timeline_text",
]
