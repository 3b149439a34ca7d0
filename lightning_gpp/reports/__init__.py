"""Plans and timelines for people: tables, text and pictures, from nothing but the plan and the timeline."""

from lightning_gpp.reports.gantt import timeline_svg
from lightning_gpp.reports.graph import graph_svg, graph_text
from lightning_gpp.reports.table import plan_table
from lightning_gpp.reports.timeline import timeline_text

__all__ = ["graph_svg", "graph_text", "plan_table", "timeline_svg", "timeline_text"]
