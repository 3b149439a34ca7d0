"""Timelines as an SVG picture: one row per device, one colour per stage, memory and an axis of time below.

Forwards are light, backwards and input gradients in full colour, weight gradients in full colour and hatched,
recomputations light and hatched. Collectives and copies are in traces (`simulation/trace_events.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from lightning_gpp.reports import svg
from lightning_gpp.reports.palette import HATCHED, NEUTRAL, action_color, stage_color, tint
from lightning_gpp.reports.timeline import MEANINGS, PLAIN, computed_kinds, computes, summary
from lightning_gpp.reports.units import duration, size, ticks
from lightning_gpp.schedules import Kind
from lightning_gpp.simulation import Span, Timeline

BAR, MEMORY, GAP, LEFT, MARGIN = 24, 22, 8, 150, 16
"""Pixels: heights of a bar, of the memory below it, and of the gap between devices; before the axis, and around all."""

TICK: Final = 90
"""Least distance of two ticks of the axis."""

LABEL, LETTER = 16, 8
"""Widths of the narrowest box with its micro-batch, and of one more letter."""


def timeline_svg(timelines: Timeline | Mapping[str, Timeline], width: int = 1000) -> str:
    """The picture. Action, stage and times of each box appear under the mouse pointer.

    Args:
        timelines: a timeline, or several of one plan by their names, such as simulated and measured.
        width: width in pixels.
    """
    chart = Chart(timelines, width)
    return svg.document(width, chart.height, chart.elements(), label=chart.label)


class Chart:
    """The rows of all devices on one axis of time, which begins with the first action of each timeline."""

    def __init__(self, timelines: Timeline | Mapping[str, Timeline], width: int, seconds: float = 0.0) -> None:
        self.timelines = {"": timelines} if isinstance(timelines, Timeline) else timelines
        self.first = next(iter(self.timelines.values()))
        self.seconds = max(seconds, *(each.makespan for each in self.timelines.values()))
        self.width = width - LEFT - MARGIN
        self.kinds = sorted({kind for each in self.timelines.values() for kind in computed_kinds(each)}, key=_ORDER)
        self.peak = max((held for row in self.first.held_bytes for _, held in row), default=0.0)
        self.row = len(self.timelines) * (BAR + 2) + (MEMORY if self.peak else 0) + GAP
        self.bottom = MARGIN + len(self.first.devices) * self.row
        self.height = self.bottom + 72 + 20 * len(self.first.stages) + MARGIN

    @property
    def label(self) -> str:
        """All timelines in words."""
        return "; ".join(f"{name}: {summary(each)}".lstrip(": ") for name, each in self.timelines.items())

    def elements(self) -> Iterator[str]:
        """Axis, rows, summary and legend."""
        yield from self.rows()
        yield svg.text(MARGIN, self.bottom + 38, summary(self.first))
        yield from _kinds_legend(self.kinds, MARGIN, self.bottom + 50)
        yield from _stages(self.first, self.bottom + 72)

    def rows(self) -> Iterator[str]:
        """The axis, and the rows of all devices."""
        yield from self._axis()
        for device in range(len(self.first.devices)):
            yield from self._device(device, MARGIN + device * self.row)

    def _axis(self) -> Iterator[str]:
        for time, label in ticks(self.seconds, self.width // TICK):
            yield svg.line((self._x(time), MARGIN), (self._x(time), self.bottom))
            yield svg.text(self._x(time), self.bottom + 13, label, "middle", "muted small")

    def _device(self, device: int, top: float) -> Iterator[str]:
        idle = self.first.bubble_fractions[device]
        yield svg.text(MARGIN, top + 16, f"device {device}")
        below = top + 32 + (len(self.timelines) - 1) * (BAR + 2)
        yield svg.text(MARGIN, below, f"idle {100 * idle:.0f} %{self._peak(device)}", classes="muted small")
        for name, timeline in self.timelines.items():
            if name:
                yield svg.text(LEFT - 6, top + 16, name, "end", "muted small")
            for span in timeline.devices[device]:
                if computes(span.action):
                    yield from self._box(timeline, span, top)
            top += BAR + 2
        if self.peak:
            yield self._memory(device, top)

    def _peak(self, device: int) -> str:
        return f", {size(self.first.peak_bytes[device])}" if self.first.peak_bytes else ""

    def _box(self, timeline: Timeline, span: Span, top: float) -> Iterator[str]:
        action, start, stop = span.action, span.start - timeline.start, span.stop - timeline.start
        x, width = self._x(start), self._x(stop) - self._x(start)
        title = f"{action} {timeline.stages[action.stage]}: {duration(start)} to {duration(stop)}"
        yield svg.rectangle(x, top, max(0.5, width - 0.7), BAR, action_color(action.stage, action.kind), title)
        if action.kind in HATCHED:
            yield svg.rectangle(x, top, width, BAR, "url(#hatch)", title)
        if width >= LABEL:
            lettered = width >= LABEL + LETTER and not set(self.kinds) <= set(PLAIN)
            text = f"{action.kind.value if lettered else ''}{action.micro_batch}"
            yield svg.text(x + width / 2, top + BAR / 2 + 4, text, "middle", "on")

    def _memory(self, device: int, top: float) -> str:
        """The memory of a device over time, as high as its row at the highest peak of all."""
        bottom, held, points = top + MEMORY, 0.0, list[svg.Point]()
        for time, after in self.first.held_bytes[device]:
            x = self._x(time - self.first.start)
            points += [(x, bottom - MEMORY * each / self.peak) for each in (held, after)]
            held = after
        end = self._x(self.first.makespan)
        corners = [(LEFT, bottom), *points, (end, bottom - MEMORY * held / self.peak), (end, bottom)]
        return svg.area(corners, f"memory of device {device}{self._peak(device)} at most")

    def _x(self, time: float) -> float:
        return LEFT + (time * self.width / self.seconds if self.seconds else 0.0)


_ORDER: Final = list(Kind).index


def _kinds_legend(kinds: Sequence[Kind], x: float, top: float) -> Iterator[str]:
    """The kinds of actions in a line: their boxes, letters and meanings."""
    for kind in kinds:
        yield svg.rectangle(x, top, 12, 12, NEUTRAL if action_color(0, kind) == stage_color(0) else tint(NEUTRAL))
        if kind in HATCHED:
            yield svg.rectangle(x, top, 12, 12, "url(#hatch)")
        label = f"{kind.value} {MEANINGS[kind]}"
        yield svg.text(x + 18, top + 11, label)
        x += 34 + svg.LETTER * len(label)


def _stages(timeline: Timeline, top: float) -> Iterator[str]:
    for stage, name in enumerate(timeline.stages):
        y = top + 20 * stage
        yield svg.rectangle(MARGIN, y, 12, 12, stage_color(stage))
        yield svg.text(MARGIN + 20, y + 11, f"{stage} {name}")
