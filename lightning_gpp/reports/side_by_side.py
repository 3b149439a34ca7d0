"""A picture of two plans of one model, a chain of stages and a graph: their stages, and a step of both on one axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lightning_gpp.planning import Prediction
from lightning_gpp.reports import svg
from lightning_gpp.reports.gantt import Axis, DeviceRows, kinds_legend
from lightning_gpp.reports.graph import GraphPicture, compact
from lightning_gpp.reports.units import duration, percent, size
from lightning_gpp.wording import counted

MARGIN: Final = 20
LEFT: Final = 84
BAR: Final = 20
SPACE: Final = 34
"""Pixels: around the picture, before the axis, the height of a device's bar, and between the two plans."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """One of the plans: its title, stage graph and timeline."""

    title: str
    prediction: Prediction
    graph: GraphPicture
    rows: DeviceRows

    @property
    def chart(self) -> float:
        """Distance of the timeline from the top."""
        return 34 + self.graph.height + 16

    @property
    def height(self) -> float:
        return self.chart + self.rows.height

    @property
    def figures(self) -> str:
        timeline = self.prediction.timeline
        peak = f", peak {size(max(timeline.peak_bytes))}" if timeline.peak_bytes else ""
        return f"step {duration(timeline.makespan)}, idle {percent(timeline.bubble_fraction)}{peak}"

    def elements(self, top: float, right: float) -> Iterator[str]:
        yield svg.text(MARGIN, top + 14, self.title, classes="strong")
        yield svg.text(right, top + 14, self.figures, "end", "strong")
        yield from self.graph.elements(LEFT, top + 34)
        yield from self.rows.elements(top + self.chart)


def chain_and_graph_svg(chain: Prediction, graph: Prediction, heading: str = "", width: int = 980) -> str:
    """The picture: the chain above, the graph below, with step time, idle share and highest peak memory of both.

    Args:
        chain: a plan whose stages run one after the other.
        graph: a plan of the same model, in which stages that need nothing from each other run at the same time.
        heading: what the two are plans of.
        width: width in pixels.
    """
    longest = max(chain.timeline.makespan, graph.timeline.makespan)
    axis = Axis(longest, LEFT, width - LEFT - MARGIN)
    above, below = (_panel(name, prediction, axis) for name, prediction in (("Chain", chain), ("Graph", graph)))
    first = MARGIN + (30 if heading else 0)
    second = first + above.height + SPACE
    bottom = second + below.height
    elements = [
        svg.text(MARGIN, MARGIN + 12, heading, classes="title"),
        *above.elements(first, width - MARGIN),
        *below.elements(second, width - MARGIN),
        *axis.labels(bottom),
        *_saving(axis, chain.timeline.makespan, graph.timeline.makespan, second + below.chart, bottom),
        *kinds_legend(below.rows.shown, LEFT, bottom + 32),
    ]
    label = f"{heading} {above.title}: {above.figures}. {below.title}: {below.figures}."
    return svg.document(width, bottom + 32 + 12 + MARGIN, elements, label=label)


def _panel(name: str, prediction: Prediction, axis: Axis) -> _Panel:
    plan = prediction.plan
    title = f"{name}: {counted(len(plan.stages), 'stage')}, {plan.depth} deep"
    graph = GraphPicture(plan, compact(plan, axis.width))
    return _Panel(title, prediction, graph, DeviceRows(prediction.timeline, axis, BAR, 4))


def _saving(axis: Axis, chain: float, graph: float, top: float, bottom: float) -> Iterator[str]:
    """A bracket over the time that the graph saves."""
    if graph >= chain:
        return
    start, stop, middle = axis.x(graph), axis.x(chain), (top + bottom) / 2
    yield svg.line((start, top), (start, bottom), "mark")
    yield svg.line((start, middle), (stop, middle), "mark")
    yield svg.line((stop, middle - 5), (stop, middle + 5), "mark")
    yield svg.text((start + stop) / 2, middle - 8, f"{percent(1 - graph / chain)} shorter", "middle", "strong")
