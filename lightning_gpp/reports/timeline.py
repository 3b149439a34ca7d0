"""Timelines as text and as an SVG picture: one row per device, time from left to right.

In the picture, each stage has a colour, with an axis of time below. Forwards are light, backwards and input
gradients in full colour, weight gradients in full colour and hatched, recomputations light and hatched. Collectives and
copies are in traces (`simulation/trace_events.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from lightning_gpp.reports import svg
from lightning_gpp.reports.svg import HATCHED, NEUTRAL, action_color, stage_color, tint
from lightning_gpp.reports.terminal import together, wrapped
from lightning_gpp.reports.units import duration, percent, size, ticks
from lightning_gpp.schedules import Action, Kind
from lightning_gpp.schedules.actions import COLLECTIVES, COPIES
from lightning_gpp.simulation import Span, Timeline

IDLE = "."

WIDTH = 110
"""Characters of a line by default."""

MEANINGS: Final = {
    Kind.DATA: "user's step up to the network",
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "forward again",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradients",
    Kind.WEIGHT: "weight gradients",
}

PLAIN: Final = (Kind.DATA, Kind.FORWARD, Kind.BACKWARD)
"""Kinds that need no legend."""


def timeline_text(timeline: Timeline, width: int = WIDTH) -> str:
    """A Gantt chart for the terminal.

    A forward is drawn as `F0` (micro-batch 0) and a backward as `B0`, stretched with `=` to its duration; if a device
    holds several stages, the stage comes first: `2F0`. An action too short for its name is drawn as its letter, or not
    at all. Dots are idle time. The last line explains letters other than `D`, `F` and `B`. Collectives, and copies to
    and from the host, are in the trace of the timeline (`trace_of`).

    Args:
        timeline: simulated or measured.
        width: characters of the longest line.
    """
    labels = [f"device {device}" for device in range(len(timeline.devices))]
    notes = [_note(timeline, device) for device in range(len(timeline.devices))]
    indent = max(map(len, labels))
    columns = max(8, width - indent - max(map(len, notes)) - 6)
    origin, makespan, rows = timeline.start, timeline.makespan, list[str]()
    for label, spans, note in zip(labels, timeline.devices, notes, strict=True):
        rows.append(f"{label.rjust(indent)} |{_bar(spans, origin, makespan, columns)}| {note}")
    below = (summary(timeline, width), *(wrapped(line, width) for line in _legend(timeline)))
    return "\n".join([*rows, *_axis(timeline, indent, columns), *below])


def _legend(timeline: Timeline) -> list[str]:
    kinds = computed_kinds(timeline)
    if set(kinds) <= set(PLAIN):
        return []
    return [", ".join(f"{kind.value} {MEANINGS[kind]}" for kind in kinds)]


def summary(timeline: Timeline, width: int | None = None) -> str:
    """Time and idle fraction, and for each stage the most micro-batches in flight.

    Args:
        timeline: simulated or measured.
        width: characters of a line, longer ones are broken; None: any number.
    """
    flights = timeline.peak_in_flight.items()
    stages = ", ".join(together(f"{timeline.stages[stage]} {most}") for stage, most in flights)
    whole = "step" if timeline.num_batches == 1 else f"{timeline.num_batches} mini-batches without a flush"
    line = f"{whole} {duration(timeline.makespan)}, idle {percent(timeline.bubble_fraction)}; in flight: {stages}"
    return wrapped(line, width or len(line))


def _note(timeline: Timeline, device: int) -> str:
    memory = f", {size(timeline.peak_bytes[device])}" if timeline.peak_bytes else ""
    return f"idle {percent(timeline.bubble_fractions[device])}{memory}"


def _axis(timeline: Timeline, indent: int, columns: int) -> list[str]:
    end = duration(timeline.makespan)
    return [" " * indent + " 0" + end.rjust(columns)]


def _bar(spans: Sequence[Span], origin: float, makespan: float, columns: int) -> str:
    cells = [IDLE] * columns
    several = len({span.action.stage for span in spans}) > 1
    scale = columns / makespan if makespan else 0.0
    for span in spans:
        if not computes(span.action):
            continue
        first, last = round((span.start - origin) * scale), round((span.stop - origin) * scale)
        cells[first:last] = _label(span.action, last - first, several)
    return "".join(cells)


def _label(action: Action, width: int, several: bool) -> str:
    """The action in exactly `width` characters."""
    letter = action.kind.value
    if action.kind is Kind.DATA:
        return letter[:width].ljust(width, "=")
    full = f"{letter}{action.micro_batch}"
    for text in ((f"{action.stage}{full}",) if several else ()) + (full, letter):
        if len(text) <= width:
            return text.ljust(width, "=")
    return ""


def computes(action: Action) -> bool:
    """True if an action occupies its device; collectives and copies do not."""
    return action.kind not in (*COLLECTIVES, *COPIES)


def computed_kinds(timeline: Timeline) -> list[Kind]:
    """The kinds of actions that the timeline's devices compute."""
    kinds = {span.action.kind for device in timeline.devices for span in device}
    return [kind for kind in MEANINGS if kind in kinds]


PIXELS, BAR, GAP, LEFT, MARGIN = 1000, 24, 8, 150, 16
"""Pixels: width; heights of a bar and of the gap between devices; before the axis, and around all."""

TICK: Final = 90
"""Least distance of two ticks of the axis."""

LABEL, LETTER = 16, 8
"""Widths of the narrowest box with its micro-batch, and of one more letter."""


def timeline_svg(timelines: Timeline | Mapping[str, Timeline]) -> str:
    """The picture. Action, stage and times of each box appear under the mouse pointer.

    Args:
        timelines: a timeline, or several of one plan by their names, such as simulated and measured.
    """
    chart = Chart(timelines, PIXELS)
    return svg.document(PIXELS, chart.height, chart.elements(), label=chart.label)


class Chart:
    """The rows of all devices on one axis of time, which begins with the first action of each timeline."""

    def __init__(self, timelines: Timeline | Mapping[str, Timeline], width: int, seconds: float = 0.0) -> None:
        self.timelines = {"": timelines} if isinstance(timelines, Timeline) else timelines
        self.first = next(iter(self.timelines.values()))
        self.seconds = max(seconds, *(each.makespan for each in self.timelines.values()))
        self.width = width - LEFT - MARGIN
        self.kinds = sorted({kind for each in self.timelines.values() for kind in computed_kinds(each)}, key=_ORDER)
        self.row = len(self.timelines) * (BAR + 2) + GAP
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
