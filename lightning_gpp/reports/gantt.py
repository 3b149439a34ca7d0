"""A timeline as an SVG picture: one row per device, one colour per stage. Forwards are light, backwards and input
gradients dark, weight gradients dark and hatched, recomputations light and hatched. Collectives are in a strip below
their devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_gpp.reports import svg
from lightning_gpp.reports.lanes import MEANINGS, PLAIN, CollectiveSpan, collectives, computes, kinds_of
from lightning_gpp.reports.timeline import summary
from lightning_gpp.reports.units import duration
from lightning_gpp.schedules import Kind
from lightning_gpp.schedules.actions import COLLECTIVES
from lightning_gpp.simulation import Span, Timeline

ROW, GAP, LEFT, MARGIN = 26, 8, 80, 16

OPACITY = {
    Kind.DATA: 0.2,
    Kind.FORWARD: 0.45,
    Kind.RECOMPUTE: 0.45,
    Kind.BACKWARD: 0.9,
    Kind.INPUT: 0.9,
    Kind.WEIGHT: 0.9,
    Kind.UNSHARD: 0.45,
    Kind.RESHARD: 0.2,
    Kind.REDUCE: 0.9,
}

HATCHED = (Kind.RECOMPUTE, Kind.WEIGHT)

STRIP = 8
"""Height of the strip of collectives below each device, if there are any."""

NARROWEST_LABEL, LETTER, MARK = 16, 8, 2
"""Widths in pixels: a box with its micro-batch number, one more letter, and the least in the strip."""


def timeline_svg(timeline: Timeline, width: int = 1000) -> str:
    """The picture. Action, stage and times of each box appear under the mouse pointer.

    Args:
        timeline: simulated or measured.
        width: width in pixels.
    """
    canvas = _Canvas(timeline, width)
    elements = [svg.HATCH, *(element for device in range(len(timeline.devices)) for element in canvas.device(device))]
    bottom = MARGIN + len(timeline.devices) * canvas.row
    legend = [*_kinds(canvas.kinds, bottom + 26), *_stages(timeline, bottom + 46)]
    elements += [svg.text(LEFT, bottom + 14, summary(timeline)), *legend]
    return svg.document(width, bottom + 46 + 20 * len(timeline.stages) + MARGIN, elements)


class _Canvas:
    """Positions of times and devices in the picture."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        self.timeline, self.kinds, self.origin = timeline, kinds_of(timeline), timeline.start
        self.scale = (width - LEFT - MARGIN) / timeline.makespan if timeline.makespan else 0.0
        self.row = ROW + GAP + (STRIP if any(kind in COLLECTIVES for kind in self.kinds) else 0)
        self.lettered = not set(self.kinds) <= set(PLAIN)

    def device(self, device: int) -> Iterator[str]:
        """Label, boxes and strip of a device."""
        top = MARGIN + device * self.row
        yield svg.text(LEFT - 8, top + 17, f"device {device}", anchor="end")
        for span in self.timeline.devices[device]:
            if computes(span.action):
                yield from self._box(span, top)
        for entry in collectives(self.timeline, device):
            yield self._mark(entry, top + ROW)

    def _box(self, span: Span, top: float) -> Iterator[str]:
        action, x, width = span.action, self._x(span.start), (span.stop - span.start) * self.scale
        title = f"{action} {self._title(action.stage, span.start, span.stop)}"
        yield svg.rectangle(x, top, width, ROW, _color(action.stage), title, OPACITY[action.kind])
        if action.kind in HATCHED:
            yield svg.rectangle(x, top, width, ROW, "url(#hatch)", title)
        letter = action.kind.value if self.lettered and width >= NARROWEST_LABEL + LETTER else ""
        if width >= NARROWEST_LABEL:
            yield svg.text(x + width / 2, top + 17, f"{letter}{action.micro_batch}", anchor="middle")

    def _mark(self, entry: CollectiveSpan, top: float) -> str:
        title = f"{MEANINGS[entry.kind]}, {self._title(entry.stage, entry.start, entry.stop)}"
        width = max(MARK, (entry.stop - entry.start) * self.scale)
        return svg.rectangle(self._x(entry.start), top, width, STRIP, _color(entry.stage), title, OPACITY[entry.kind])

    def _x(self, time: float) -> float:
        return LEFT + (time - self.origin) * self.scale

    def _title(self, stage: int, start: float, stop: float) -> str:
        return f"{self.timeline.stages[stage]}: {duration(start)} to {duration(stop)}"


def _color(stage: int) -> str:
    return svg.COLORS[stage % len(svg.COLORS)]


def _kinds(kinds: Sequence[Kind], top: float) -> Iterator[str]:
    """Legend of the kinds of actions."""
    x = float(LEFT)
    for kind in kinds:
        yield svg.rectangle(x, top, 12, 12, "#555", opacity=OPACITY[kind])
        if kind in HATCHED:
            yield svg.rectangle(x, top, 12, 12, "url(#hatch)")
        label = f"{kind.value} {MEANINGS[kind]}"
        yield svg.text(x + 18, top + 11, label)
        x += 34 + 6.5 * len(label)


def _stages(timeline: Timeline, top: float) -> Iterator[str]:
    for stage, name in enumerate(timeline.stages):
        y = top + 20 * stage
        yield svg.rectangle(LEFT, y, 12, 12, _color(stage))
        yield svg.text(LEFT + 20, y + 11, f"{stage} {name}")
