"""A timeline as a picture: one row per device, forwards light, backwards dark, one colour per stage."""

from __future__ import annotations

from lightning_gpp.reports import svg
from lightning_gpp.reports.timeline import summary
from lightning_gpp.reports.units import duration
from lightning_gpp.schedules import Kind
from lightning_gpp.simulation import Span, Timeline

ROW, GAP, LEFT, MARGIN = 26, 8, 80, 16

OPACITY = {Kind.DATA: 0.2, Kind.FORWARD: 0.45, Kind.BACKWARD: 0.9}

NARROWEST_LABEL = 16
"""Pixels that a box needs for its micro-batch number."""


def timeline_svg(timeline: Timeline, width: int = 1000) -> str:
    """The picture; action, stage and times of each box show under the mouse.

    Args:
        timeline: simulated or measured.
        width: in pixels.
    """
    origin = min((spans[0].start for spans in timeline.devices if spans), default=0.0)
    scale = (width - LEFT - MARGIN) / timeline.makespan if timeline.makespan else 0.0
    elements: list[str] = []
    for device, spans in enumerate(timeline.devices):
        top = MARGIN + device * (ROW + GAP)
        elements.append(svg.text(LEFT - 8, top + 17, f"device {device}", anchor="end"))
        for span in spans:
            elements += _box(timeline, span, LEFT + (span.start - origin) * scale, top, scale)
    bottom = MARGIN + len(timeline.devices) * (ROW + GAP)
    elements += [svg.text(LEFT, bottom + 14, summary(timeline)), *_legend(timeline, bottom + 26)]
    return svg.document(width, bottom + 26 + 20 * len(timeline.stages) + MARGIN, elements)


def _box(timeline: Timeline, span: Span, x: float, top: float, scale: float) -> list[str]:
    action, width = span.action, (span.stop - span.start) * scale
    title = f"{action} {timeline.stages[action.stage]}: {duration(span.start)} to {duration(span.stop)}"
    color = svg.COLORS[action.stage % len(svg.COLORS)]
    box = svg.rectangle(x, top, width, ROW, color, title, OPACITY[action.kind])
    if width < NARROWEST_LABEL:
        return [box]
    return [box, svg.text(x + width / 2, top + 17, str(action.micro_batch), anchor="middle")]


def _legend(timeline: Timeline, top: float) -> list[str]:
    elements = []
    for stage, name in enumerate(timeline.stages):
        y = top + 20 * stage
        elements.append(svg.rectangle(LEFT, y, 12, 12, svg.COLORS[stage % len(svg.COLORS)]))
        elements.append(svg.text(LEFT + 20, y + 11, f"{stage} {name}"))
    return elements
