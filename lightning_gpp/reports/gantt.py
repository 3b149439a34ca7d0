"""A timeline as an SVG picture: one row per device, one colour per stage, an axis of time below.

Forwards are light, backwards and input gradients in full colour, weight gradients in full colour and hatched,
recomputations light and hatched. Collectives are in a strip below their devices, with copies to the host in its upper
half and those back in its lower one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gpp.reports import svg
from lightning_gpp.reports.lanes import BESIDE, MEANINGS, PLAIN, StripSpan, computes, kinds_of, lanes
from lightning_gpp.reports.palette import HATCHED, NEUTRAL, action_color, stage_color, tint
from lightning_gpp.reports.timeline import summary
from lightning_gpp.reports.units import duration, ticks
from lightning_gpp.schedules import Kind
from lightning_gpp.schedules.actions import COPIES
from lightning_gpp.simulation import Span, Timeline

ROW, GAP, LEFT, MARGIN = 26, 6, 80, 16

STRIP = 8
"""Height of the strip of collectives and host copies below each device, if there are any."""

TICK = 90
"""Least distance of two ticks of the axis."""

NARROWEST_LABEL, LETTER, MARK = 16, 8, 2
"""Widths in pixels: a box with its micro-batch number, one more letter, and the least in the strip."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The axis of time: `seconds` in `width` pixels from `left` on."""

    seconds: float
    left: float
    width: float

    def x(self, time: float) -> float:
        return self.left + (time * self.width / self.seconds if self.seconds else 0.0)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        return ticks(self.seconds, int(self.width // TICK))

    def lines(self, top: float, bottom: float) -> Iterator[str]:
        """A line for each tick."""
        for time, _ in self.ticks:
            yield svg.line((self.x(time), top), (self.x(time), bottom))

    def labels(self, bottom: float) -> Iterator[str]:
        """The time of each tick, below it."""
        for time, label in self.ticks:
            yield svg.text(self.x(time), bottom + 13, label, "middle", "muted small")


class DeviceRows:
    """The rows of a timeline's devices, on an axis of time that begins with its first action."""

    def __init__(self, timeline: Timeline, axis: Axis, bar: float = ROW, gap: float = GAP) -> None:
        self.timeline, self.axis, self.kinds, self.bar = timeline, axis, kinds_of(timeline), bar
        self.row = bar + gap + (STRIP if any(kind in BESIDE for kind in self.kinds) else 0)
        seen = {span.action.kind for spans in timeline.devices for span in spans if self._pixels(span) >= MARK}
        self.shown = [kind for kind in self.kinds if kind in seen or kind in BESIDE]
        self.lettered = not set(self.kinds) <= set(PLAIN)

    @property
    def height(self) -> float:
        return len(self.timeline.devices) * self.row

    def elements(self, top: float) -> Iterator[str]:
        """Lines of the axis, and labels, boxes and strips of all devices."""
        tops = [top + device * self.row for device in range(len(self.timeline.devices))]
        for y in tops:
            yield svg.rectangle(self.axis.left, y, self.axis.width, self.bar, classes="panel")
        yield from self.axis.lines(top, top + self.height)
        for device, y in enumerate(tops):
            yield from self._device(device, y)

    def _device(self, device: int, top: float) -> Iterator[str]:
        yield svg.text(self.axis.left - 8, self._baseline(top), f"device {device}", "end")
        for span in self.timeline.devices[device]:
            if computes(span.action):
                yield from self._box(span, top)
        for lane in lanes(self.timeline, device):
            yield from (self._mark(entry, top + self.bar) for entry in lane)

    def _box(self, span: Span, top: float) -> Iterator[str]:
        action, x, width = span.action, self._x(span.start), self._pixels(span)
        title = f"{action} {self._title(action.stage, span.start, span.stop)}"
        yield svg.rectangle(x, top, max(0.5, width - 0.7), self.bar, action_color(action.stage, action.kind), title)
        if action.kind in HATCHED:
            yield svg.rectangle(x, top, width, self.bar, "url(#hatch)", title)
        letter = action.kind.value if self.lettered and width >= NARROWEST_LABEL + LETTER else ""
        if width >= NARROWEST_LABEL:
            yield svg.text(x + width / 2, self._baseline(top), f"{letter}{action.micro_batch}", "middle", "on")

    def _mark(self, entry: StripSpan, top: float) -> str:
        title = f"{MEANINGS[entry.kind]}, {self._title(entry.stage, entry.start, entry.stop)}"
        width = max(MARK, self._x(entry.stop) - self._x(entry.start))
        height = STRIP / 2 if entry.kind in COPIES else STRIP
        top = top + height if entry.kind is Kind.LOAD else top
        return svg.rectangle(self._x(entry.start), top, width, height, action_color(entry.stage, entry.kind), title)

    def _baseline(self, top: float) -> float:
        return top + self.bar / 2 + 4

    def _pixels(self, span: Span) -> float:
        return self.axis.x(span.stop) - self.axis.x(span.start)

    def _x(self, time: float) -> float:
        return self.axis.x(time - self.timeline.start)

    def _title(self, stage: int, start: float, stop: float) -> str:
        origin = self.timeline.start
        return f"{self.timeline.stages[stage]}: {duration(start - origin)} to {duration(stop - origin)}"


def timeline_svg(timeline: Timeline, width: int = 1000) -> str:
    """The picture. Action, stage and times of each box appear under the mouse pointer.

    Args:
        timeline: simulated or measured.
        width: width in pixels.
    """
    axis = Axis(timeline.makespan, LEFT, width - LEFT - MARGIN)
    rows = DeviceRows(timeline, axis)
    bottom = MARGIN + rows.height
    legend = [*kinds_legend(rows.shown, LEFT, bottom + 50), *_stages(timeline, bottom + 72)]
    elements = [*rows.elements(MARGIN), *axis.labels(bottom), *legend]
    elements.append(svg.text(LEFT, bottom + 38, summary(timeline)))
    height = bottom + 72 + 20 * len(timeline.stages) + MARGIN
    return svg.document(width, height, elements, label=summary(timeline))


def kinds_legend(kinds: Sequence[Kind], left: float, top: float) -> Iterator[str]:
    """The kinds of actions in a line: their boxes, letters and meanings."""
    x = left
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
        yield svg.rectangle(LEFT, y, 12, 12, stage_color(stage))
        yield svg.text(LEFT + 20, y + 11, f"{stage} {name}")
