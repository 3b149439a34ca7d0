"""Reports for people: tables, text and pictures of plans and timelines."""

from lightning_gpp.reports.comparison import Compared, comparison_table
from lightning_gpp.reports.devices import devices_text
from lightning_gpp.reports.gantt import timeline_svg
from lightning_gpp.reports.graph import graph_svg, graph_text
from lightning_gpp.reports.measured import comparison_text
from lightning_gpp.reports.progress import search_progress
from lightning_gpp.reports.table import plan_table
from lightning_gpp.reports.terminal import terminal_width
from lightning_gpp.reports.text import period_text, prediction_text, search_text
from lightning_gpp.reports.timeline import timeline_text

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
    "search_progress",
    "search_text",
    "terminal_width",
    "timeline_svg",
    "timeline_text",
]
