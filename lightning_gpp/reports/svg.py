"""Elements and colours of SVG pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from lightning_gpp.schedules import Kind

STAGES: Final = ("#4c8edf", "#cf752d", "#3a9e57", "#aa75cf", "#0c9ba1", "#d9696c", "#9e8c0c", "#cc6ba5")
"""Colours of stages, used in turn. All are equally bright, so each can be read on white, on black, and under black."""

NEUTRAL: Final = "#8b949e"
"""The colour of what belongs to no stage: the user's step up to the network."""

PAGE, TEXT, MUTED, LINE, ARROW = "#ffffff", "#1f2328", "#59636e", "#d1d9e0", "#818b98"
"""Colours of the background, of text and quieter text, of lines behind all, and of arrows."""

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
    """The colour of an action: light for forwards, full for backwards, pale grey for what no stage computes."""
    if kind is Kind.DATA:
        return tint(NEUTRAL, 0.8)
    return tint(stage_color(stage)) if kind in FAINT else stage_color(stage)


Point = tuple[float, float]

PIXELS: Final = 1100
"""Width of pictures."""

FONT: Final = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"

LETTER: Final = 6.6
"""Width of a letter of 12 pixels, on average."""


STYLE: Final = (
    f"<style>text{{font:12px {FONT}}}text.strong{{font-weight:600}}text.title{{font-size:15px;font-weight:600}}"
    f"text.small{{font-size:11px}}text.halo{{paint-order:stroke;stroke-width:4px;stroke:{PAGE}}}.page{{fill:{PAGE}}}"
    f"text{{fill:{TEXT}}}text.muted{{fill:{MUTED}}}.grid{{stroke:{LINE}}}.arrow{{stroke:{ARROW};fill:none}}"
    f".head{{fill:{ARROW}}}text.on{{fill:#111}}</style>"
)
"""The classes of elements: `on` is text on the colour of a stage, `halo` text on lines, `grid` a line behind all."""

DEFINITIONS: Final = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M 0 0 L 8 4 L 0 8 z"/></marker>'
    '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M 0 0 L 0 5" stroke="white" stroke-width="2.5" stroke-opacity="0.55"/></pattern></defs>'
)
"""The head of arrows, and white stripes to draw over a box: fill="url(#hatch)"."""


def document(width: float, height: float, elements: Iterable[str], *, label: str = "") -> str:
    """A complete picture; sizes in pixels. `label` describes it to those who cannot see it."""
    background = f'<rect class="page" width="{width:g}" height="{height:g}" rx="6"/>'
    body = "\n".join([STYLE, DEFINITIONS, background, *elements])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label={quoteattr(label)}>\n{body}\n</svg>\n'
    )


def rectangle(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """A box that shows `title` under the mouse."""
    shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="2" fill="{fill}"'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def text(x: float, y: float, content: str, anchor: str = "start", classes: str = "") -> str:
    """A line of text. Its classes are some of strong, title, small, muted and on."""
    named = f" class={quoteattr(classes)}" if classes else ""
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"{named}>{escape(content)}</text>'


def line(start: Point, end: Point, classes: str = "grid") -> str:
    return f'<path class="{classes}" d="M {start[0]:.2f} {start[1]:.2f} L {end[0]:.2f} {end[1]:.2f}"/>'


def arrow(points: Sequence[Point], *, dashed: bool = False, title: str = "") -> str:
    """An arrow through the points: curves across gaps between columns, straight lines through columns.

    Args:
        points: alternately the beginnings and ends of curves; from one curve to the next the line is straight.
        dashed: the line is dashed.
        title: shown under the mouse.
    """
    (x, y), parts = points[0], [f"M {points[0][0]:.2f} {points[0][1]:.2f}"]
    for number, (next_x, next_y) in enumerate(points[1:]):
        middle = (x + next_x) / 2
        curve = f"C {middle:.2f} {y:.2f}, {middle:.2f} {next_y:.2f}, {next_x:.2f} {next_y:.2f}"
        parts.append(curve if number % 2 == 0 else f"L {next_x:.2f} {next_y:.2f}")
        x, y = next_x, next_y
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    path = f'<path class="arrow" d="{" ".join(parts)}" marker-end="url(#head)"{dash}'
    return f"{path}><title>{escape(title)}</title></path>" if title else f"{path}/>"
