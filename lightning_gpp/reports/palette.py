"""The colours of pictures, pages and the terminal: one per stage, the same everywhere, in light and dark."""

from __future__ import annotations

from typing import Final

from lightning_gpp.schedules import Kind

STAGES: Final = ("#4c8edf", "#cf752d", "#3a9e57", "#aa75cf", "#0c9ba1", "#d9696c", "#9e8c0c", "#cc6ba5")
"""Colours of stages, used in turn. All are equally bright, so each can be read on white, on black, and under black."""

NEUTRAL: Final = "#8b949e"
"""The colour of what belongs to no stage: the user's step up to the network."""

LIGHT: Final = {
    "page": "#ffffff",
    "text": "#1f2328",
    "muted": "#59636e",
    "line": "#d1d9e0",
    "arrow": "#818b98",
}

DARK: Final = {
    "page": "#0d1117",
    "text": "#e6edf3",
    "muted": "#9198a1",
    "line": "#30363d",
    "arrow": "#6e7681",
}

FAINT: Final = (Kind.FORWARD, Kind.RECOMPUTE)
"""Kinds in a lighter tint of the stage's colour."""

HATCHED: Final = (Kind.RECOMPUTE, Kind.WEIGHT)
"""Kinds drawn with stripes."""


def stage_color(stage: int) -> str:
    """The colour of a stage, as #rrggbb."""
    return STAGES[stage % len(STAGES)]


def tint(color: str, share: float = 0.5) -> str:
    """The colour mixed with white, of which there is a `share` of 0 to 1."""
    channels = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in channels)


def action_color(stage: int, kind: Kind) -> str:
    """The colour of an action: light for forwards, full for backwards, grey for what no stage computes."""
    if kind is Kind.DATA:
        return tint(NEUTRAL)
    return tint(stage_color(stage)) if kind in FAINT else stage_color(stage)
