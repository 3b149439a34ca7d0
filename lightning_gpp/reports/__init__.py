"""Plans and timelines for people: tables, text and pictures, from nothing but the plan and the timeline."""

from lightning_gpp.reports.compared import Scheduled, schedules_table
from lightning_gpp.reports.gantt import timeline_svg
from lightning_gpp.reports.graph import graph_svg, graph_text
from lightning_gpp.reports.measured import Comparison, Pair, compare_timelines, comparison_text
from lightning_gpp.reports.memory import memory_text
from lightning_gpp.reports.progress import search_progress
from lightning_gpp.reports.schedule import DeviceFigures, Traffic, schedule_figures, schedule_text
from lightning_gpp.reports.search import Outcome, alternatives_text, compare_table, search_text
from lightning_gpp.reports.table import plan_table
from lightning_gpp.reports.timeline import timeline_text

__all__ = [
    "Comparison",
    "DeviceFigures",
    "Outcome",
    "Pair",
    "Scheduled",
    "Traffic",
    "alternatives_text",
    "compare_table",
    "compare_timelines",
    "comparison_text",
    "graph_svg",
    "graph_text",
    "memory_text",
    "plan_table",
    "schedule_figures",
    "schedule_text",
    "schedules_table",
    "search_progress",
    "search_text",
    "timeline_svg",
    "timeline_text",
]
