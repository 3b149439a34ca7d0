"""Reports for people: tables, text and pictures of plans and timelines."""

from lightning_gpp.reports.compared import Compared, partitioners_table, schedules_table
from lightning_gpp.reports.gantt import timeline_svg
from lightning_gpp.reports.graph import graph_svg, graph_text
from lightning_gpp.reports.measured import Comparison, FigurePair, compare_timelines, comparison_text
from lightning_gpp.reports.memory import memory_text
from lightning_gpp.reports.period import period_text
from lightning_gpp.reports.progress import search_progress
from lightning_gpp.reports.schedule import DeviceFigures, Traffic, device_figures, schedule_figures, schedule_text
from lightning_gpp.reports.search import alternatives_text, search_text
from lightning_gpp.reports.side_by_side import chain_and_graph_svg
from lightning_gpp.reports.table import plan_table
from lightning_gpp.reports.terminal import terminal_width
from lightning_gpp.reports.text import prediction_text, run_text
from lightning_gpp.reports.timeline import timeline_text

__all__ = [
    "Comparison",
    "DeviceFigures",
    "Compared",
    "FigurePair",
    "Traffic",
    "alternatives_text",
    "chain_and_graph_svg",
    "compare_timelines",
    "comparison_text",
    "device_figures",
    "graph_svg",
    "graph_text",
    "memory_text",
    "partitioners_table",
    "period_text",
    "plan_table",
    "prediction_text",
    "run_text",
    "schedule_figures",
    "schedule_text",
    "schedules_table",
    "search_progress",
    "search_text",
    "terminal_width",
    "timeline_svg",
    "timeline_text",
]
