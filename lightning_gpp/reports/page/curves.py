"""Curves of logged figures over the steps of a run, as small pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import floor, isfinite, log10
from typing import Final

from lightning_gpp.reports import svg

Curve = Sequence[tuple[int, float]]
"""Values by the number of optimizer steps before them."""

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 170, 56, 12, 10, 24

MOST: Final = 400
"""Points of a curve; of more, every n-th is drawn, and the last."""


def curve_svg(name: str, curve: Curve) -> str:
    """A line through the finite values, with round figures at both axes."""
    points = [(step, value) for step, value in _thinned(curve) if isfinite(value)]
    if not points:
        return ""
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    marks = round_figures(min(value for _, value in points), max(value for _, value in points))
    low, high = marks[0], marks[-1]

    def place(step: float, value: float) -> svg.Point:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        return x, TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    path = " L ".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in points))
    elements = [
        *_grid(marks, place, first, last),
        f'<path class="curve" d="M {path}"/>',
        *((_dot(*place(*points[0])),) if len(points) == 1 else ()),
    ]
    return svg.inline(WIDTH, HEIGHT, elements, label=f"{name}, last value {points[-1][1]:.4g}")


def _dot(x: float, y: float) -> str:
    return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _grid(marks: Sequence[float], place: Callable[[float, float], svg.Point], first: int, last: int) -> Iterator[str]:
    for mark in marks:
        (left, y), (right, _) = place(first, mark), place(last, mark)
        yield svg.line((left, y), (right, y))
        yield svg.text(left - 6, y + 4, f"{mark:.4g}", "end", "muted small")
    bottom = HEIGHT - BOTTOM + 16
    yield svg.text(LEFT, bottom, f"step {first}", "start", "muted small")
    yield svg.text(WIDTH - RIGHT, bottom, str(last), "end", "muted small")


def _thinned(curve: Curve) -> Curve:
    if len(curve) <= MOST:
        return curve
    every = -(-len(curve) // MOST)
    return [*curve[::every], curve[-1]]


def round_figures(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers at equal distances around all values, at most `most` + 2 of them."""
    if high <= low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    least = (high - low) / most
    power = 10.0 ** floor(log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    start = floor(low / step + 1e-9)
    figures = [start * step]
    while figures[-1] < high * (1 - 1e-9 if high > 0 else 1 + 1e-9):
        figures.append((start + len(figures)) * step)
    return figures
