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
from lightning_gpp.reports.terminal import wrapped
from lightning_gpp.reports.units import duration, percent, ranges, size, ticks
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
    holds several stages, the stage comes first: `2F0`. Neighbours too short for their names share one, as `F0-7=B0-7`,
    or have none. Dots are idle time. The last line explains letters other than `D`, `F` and `B`. Collectives, and
    copies to and from the host, are in the trace of the timeline (`trace_of`).

    Args:
        timeline: simulated or measured.
        width: characters of the longest line.
    """
    shown = rows_of(timeline)
    labels = [f"device {ranges(row)}" for row in shown]
    notes = [_note(timeline, *row) for row in shown]
    indent = max(map(len, labels))
    columns = max(8, width - indent - max(map(len, notes)) - 6)
    bars = (_bar(timeline.devices[row[0]], timeline, columns) for row in shown)
    rows = [f"{label.rjust(indent)} |{bar}| {note}" for label, bar, note in zip(labels, bars, notes, strict=True)]
    axis = " " * indent + " 0" + duration(timeline.makespan).rjust(columns)
    return "\n".join([*rows, axis, summary(timeline), *(wrapped(line, width) for line in _legend(timeline))])


def _legend(timeline: Timeline) -> list[str]:
    kinds = computed_kinds(timeline)
    if set(kinds) <= set(PLAIN):
        return []
    return [", ".join(f"{kind.value} {MEANINGS[kind]}" for kind in kinds)]


def summary(timeline: Timeline) -> str:
    """Time and idle fraction."""
    whole = "step" if timeline.num_batches == 1 else f"{timeline.num_batches} mini-batches without a flush"
    return f"{whole} {duration(timeline.makespan)}, idle {percent(timeline.bubble_fraction)}"


def rows_of(timeline: Timeline) -> list[list[int]]:
    """The devices of each row: one, or at last all that are not used."""
    unused = [device for device, spans in enumerate(timeline.devices) if not spans]
    used = [[device] for device, spans in enumerate(timeline.devices) if spans]
    return [*used, *([unused] if unused else [])]


def _note(timeline: Timeline, device: int, *_: int) -> str:
    if not timeline.devices[device]:
        return "unused"
    memory = f", {size(timeline.peak_bytes[device])}" if timeline.peak_bytes else ""
    return f"idle {percent(timeline.bubble_fractions[device])}{memory}"


def _bar(spans: Sequence[Span], timeline: Timeline, columns: int) -> str:
    cells, several = [IDLE] * columns, len({span.action.stage for span in spans}) > 1
    for first, last, actions in _runs(spans, timeline, columns, several):
        cells[first:last] = _label(actions, last - first, several)
    return "".join(cells)


def _runs(
    spans: Sequence[Span], timeline: Timeline, columns: int, several: bool
) -> list[tuple[int, int, list[Action]]]:
    """Columns and actions of what is drawn as one: neighbours without room for their names."""
    runs, was_narrow = list[tuple[int, int, list[Action]]](), False
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    for span in filter(lambda span: computes(span.action), spans):
        first, last = (round((time - timeline.start) * scale) for time in (span.start, span.stop))
        narrow = last - first < len(_name([span.action], several))
        if runs and narrow and was_narrow and first == runs[-1][1]:
            first, _, actions = runs.pop()
            actions.append(span.action)
            runs.append((first, last, actions))
        else:
            runs.append((first, last, [span.action]))
        was_narrow = narrow
    return runs


def _label(actions: Sequence[Action], width: int, several: bool) -> str:
    """The actions in exactly `width` characters."""
    letters = "".join(dict.fromkeys(action.kind.value for action in actions))
    text = next((text for text in (_name(actions, several), letters) if len(text) <= width), "")
    return text.ljust(width, "=")


def _name(actions: Sequence[Action], several: bool) -> str:
    """`F0-7=B0-6`: the micro-batches of each kind; those of data only if there is nothing else."""
    numbers = dict[str, set[int]]()
    for action in actions:
        if action.kind is not Kind.DATA or len(actions) == 1:
            kind = f"{action.stage if several else ''}{action.kind.value}"
            numbers.setdefault(kind, set()).add(action.micro_batch)
    return "=".join(kind + ranges(sorted(found)).replace(",", "+") for kind, found in numbers.items())


def computes(action: Action) -> bool:
    """True if an action occupies its device; collectives and copies do not."""
    return action.kind not in (*COLLECTIVES, *COPIES)


def computed_kinds(timeline: Timeline) -> list[Kind]:
    """The kinds of actions that the timeline's devices compute."""
    kinds = {span.action.kind for device in timeline.devices for span in device}
    return [kind for kind in MEANINGS if kind in kinds]


BAR, GAP, LEFT, MARGIN = 24, 8, 150, 16
"""Pixels: heights of a bar and of the gap between devices; before the axis, and around all."""

TICK: Final = 90
"""Least distance of two ticks of the axis."""

LABEL, LETTER = 16, 8
"""Widths of the narrowest box with its micro-batch, and of one more letter."""


def timeline_svg(timelines: Timeline | Mapping[str, Timeline]) -> str:
    """The picture. Action, stage and times of each box appear under the mouse pointer.

    Args:
        timelines: a timeline, or several of one plan by their names, such as simulated and measured.
    """
    chart = Chart(timelines, svg.PIXELS)
    return svg.document(svg.PIXELS, chart.height, chart.elements(), label=chart.label)


def _grey(kind: Kind) -> str:
    """The colour of a kind of action, of any stage."""
    color = action_color(0, kind)
    return NEUTRAL if color == stage_color(0) else tint(NEUTRAL) if color == tint(stage_color(0)) else color


class Chart:
    """The rows of all devices on one axis of time, which begins with the first action of each timeline."""

    def __init__(self, timelines: Timeline | Mapping[str, Timeline], width: int, seconds: float = 0.0) -> None:
        self.timelines = {"": timelines} if isinstance(timelines, Timeline) else timelines
        self.first = next(iter(self.timelines.values()))
        self.seconds = max(seconds, *(each.makespan for each in self.timelines.values()))
        self.width = width - LEFT - MARGIN
        self.kinds = sorted({kind for each in self.timelines.values() for kind in computed_kinds(each)}, key=_ORDER)
        self.row = len(self.timelines) * (BAR + 2) + GAP
        self.devices = rows_of(self.first)
        self.bottom = MARGIN + len(self.devices) * self.row
        self.legend = list(self._legend(width - MARGIN))
        self.height = self.legend[-1][1] + 20 + MARGIN if self.legend else self.bottom + 40

    @property
    def label(self) -> str:
        """All timelines in words."""
        return "; ".join(f"{name}: {summary(each)}".lstrip(": ") for name, each in self.timelines.items())

    def elements(self) -> Iterator[str]:
        """Axis, rows, summary and legend."""
        yield from self.rows()
        yield svg.text(MARGIN, self.bottom + 38, summary(self.first))
        for x, y, color, hatched, label in self.legend:
            yield svg.rectangle(x, y, 12, 12, color)
            if hatched:
                yield svg.rectangle(x, y, 12, 12, "url(#hatch)")
            yield svg.text(x + 18, y + 11, label)

    def rows(self) -> Iterator[str]:
        """The axis, and the rows of all devices."""
        yield from self._axis()
        for number, devices in enumerate(self.devices):
            yield from self._device(devices, MARGIN + number * self.row)

    def _axis(self) -> Iterator[str]:
        for time, label in ticks(self.seconds, self.width // TICK):
            yield svg.line((self._x(time), MARGIN), (self._x(time), self.bottom))
            yield svg.text(self._x(time), self.bottom + 13, label, "middle", "muted small")

    def _legend(self, right: float) -> Iterator[tuple[float, float, str, bool, str]]:
        """Place, colour, whether it is hatched, and text of each entry: kinds of actions, then stages, in lines."""
        entries = [(_grey(kind), kind in HATCHED, f"{kind.value} {MEANINGS[kind]}") for kind in self.kinds]
        entries += [(stage_color(stage), False, f"{stage} {name}") for stage, name in enumerate(self.first.stages)]
        x, y = float(MARGIN), self.bottom + 50
        for color, hatched, label in entries:
            needed = 34 + svg.LETTER * len(label)
            if x > MARGIN and x + needed > right:
                x, y = float(MARGIN), y + 20
            yield x, y, color, hatched, label
            x += needed

    def _device(self, devices: Sequence[int], top: float) -> Iterator[str]:
        device = devices[0]
        yield svg.text(MARGIN, top + 13, f"device {ranges(devices)}")
        below = top + 27 + (len(self.timelines) - 1) * (BAR + 2)
        yield svg.text(MARGIN, below, _note(self.first, device), classes="muted small")
        for name, timeline in self.timelines.items():
            if name:
                yield svg.text(LEFT - 6, top + 16, name, "end", "muted small")
            for span in timeline.devices[device]:
                if computes(span.action):
                    yield from self._box(timeline, span, top)
            top += BAR + 2

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
