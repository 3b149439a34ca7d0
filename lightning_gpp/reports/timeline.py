"""A timeline as text: one row per device, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_gpp.errors import ConfigError
from lightning_gpp.reports.terminal import together, wrapped
from lightning_gpp.reports.units import duration, percent, size
from lightning_gpp.schedules import Action, Kind
from lightning_gpp.schedules.actions import COLLECTIVES, COPIES
from lightning_gpp.simulation import Span, Timeline

IDLE = "."

WIDTH, MIN_WIDTH = 110, 40
"""Characters of a line by default, and at least."""

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
        width: characters of the longest line; at least 40.

    Raises:
        ConfigError: the width is too small.
    """
    if width < MIN_WIDTH:
        raise ConfigError(f"A timeline needs a width of at least {MIN_WIDTH} characters, got {width}.")
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
    """Time and idle fraction, and for each stage its warm-up and peak of micro-batches in flight.

    Args:
        timeline: simulated or measured.
        width: characters of a line, longer ones are broken; None: any number.
    """
    flights, warm_up = timeline.peak_in_flight, timeline.warm_up
    stages = ", ".join(
        together(f"{timeline.stages[stage]} {warm_up.get(stage, 0)}/{flights[stage]}") for stage in sorted(flights)
    )
    whole = "step" if timeline.num_batches == 1 else f"{timeline.num_batches} mini-batches without a flush"
    line = (
        f"{whole} {duration(timeline.makespan)}, idle {percent(timeline.bubble_fraction)}; "
        f"warm-up/peak in flight: {stages}"
    )
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
