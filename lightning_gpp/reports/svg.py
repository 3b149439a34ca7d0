"""SVG elements for the pictures."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#e15759", "#9c755f")
"""Colours of stages or devices, used in turn."""


def document(width: float, height: float, elements: Iterable[str]) -> str:
    """A complete picture on white; sizes in pixels."""
    body = "\n".join(elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def rectangle(x: float, y: float, width: float, height: float, fill: str, title: str = "", opacity: float = 1) -> str:
    """A box that shows `title` under the mouse."""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="2" fill="{fill}" '
        f'fill-opacity="{opacity:g}" stroke="#333" stroke-width="0.5"><title>{escape(title)}</title></rect>'
    )


def text(x: float, y: float, content: str, anchor: str = "start", fill: str = "#222") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor={quoteattr(anchor)} fill="{fill}">{escape(content)}</text>'


def arrow(start: tuple[float, float], end: tuple[float, float], dashed: bool = False) -> str:
    """A curve from left to right with a head; needs `ARROW_HEAD` in the document."""
    (x1, y1), (x2, y2) = start, end
    middle = (x1 + x2) / 2
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<path d="M {x1:.2f} {y1:.2f} C {middle:.2f} {y1:.2f}, {middle:.2f} {y2:.2f}, {x2:.2f} {y2:.2f}" '
        f'fill="none" stroke="#555" marker-end="url(#head)"{dash}/>'
    )


ARROW_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M 0 0 L 8 4 L 0 8 z" fill="#555"/></marker></defs>'
)
"""Defines the head of every arrow."""

HATCH = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M 0 0 L 0 5" stroke="white" stroke-width="2.5" stroke-opacity="0.7"/></pattern></defs>'
)
"""Defines white stripes to draw over a box: fill="url(#hatch)"."""
