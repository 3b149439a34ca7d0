"""The stage graph of a plan, as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import networkx as nx

from lightning_gpp.plan import SOURCE, Edge, Plan, Stage
from lightning_gpp.reports import svg
from lightning_gpp.reports.layers import GridPlace, Layers, layers
from lightning_gpp.reports.palette import stage_color, tint
from lightning_gpp.reports.table import measures
from lightning_gpp.reports.terminal import together, wrapped
from lightning_gpp.reports.units import count, size

MARGIN: Final = 16

LABEL: Final = 13
"""Height of a line of small text."""

STRONG: Final = 7.6
"""Width of a strong letter, on average, in the widest of usual fonts."""


def levels(plan: Plan) -> list[list[int]]:
    """Stages by the length of their longest path from the source; those of one level do not wait for each other."""
    return [sorted(level) for level in nx.topological_generations(plan.graph())]


def graph_text(plan: Plan, width: int | None = None) -> str:
    """One line per level of the stage graph, one arrow per edge: stages of one level can compute at the same time.

    Args:
        plan: the plan.
        width: characters of a line, longer ones are broken; None: any number.
    """
    lines = []
    for number, level in enumerate(levels(plan)):
        line = f"level {number}: " + " | ".join(together(_title(plan, stage)) for stage in level)
        lines.append(wrapped(line, width or len(line), indent=9))
        lines += [f"    {_arrow(plan, edge)}" for edge in plan.edges if edge.dst in level and edge.src != SOURCE]
    return "\n".join(lines)


def _title(plan: Plan, stage: int) -> str:
    return f"{stage} {plan.stages[stage].name} ({where(plan.stages[stage])})"


def _arrow(plan: Plan, edge: Edge) -> str:
    return f"{plan.stages[edge.src].name} -> {plan.stages[edge.dst].name}: {_load(plan, edge)}"


def _load(plan: Plan, edge: Edge) -> str:
    if edge.artificial:
        return "order only"
    return size(edge.bytes.at(plan.stages[edge.dst].micro_batch_size)) + (" both ways" if edge.differentiable else "")


def graph_svg(plan: Plan) -> str:
    """The stage graph from left to right, in the colours of the stages; no edge crosses a box.

    A box shows name, devices, replicas, what it recomputes, parameters and FLOPs, an edge its bytes per micro-batch.
    """
    return svg.document(*_detailed(plan), label=graph_text(plan))


def graph_picture(plan: Plan) -> str:
    """The same for a page that has `svg.STYLE` and `svg.DEFINITIONS`."""
    return svg.inline(*_detailed(plan), label=graph_text(plan))


def _detailed(plan: Plan) -> tuple[float, float, Iterator[str]]:
    picture = GraphPicture(plan, DETAILED)
    return picture.width + 2 * MARGIN, picture.height + 2 * MARGIN, picture.elements(MARGIN, MARGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSize:
    """Sizes in pixels, and whether there is room for details: devices, parameters and bytes."""

    width: float
    height: float
    gap_x: float
    gap_y: float
    detailed: bool = True


DETAILED: Final = BoxSize(width=178, height=58, gap_x=84, gap_y=22)


def compact(plan: Plan, width: float) -> BoxSize:
    """Small boxes, with which the stage graph fits a width if it has at most a dozen columns."""
    gap = 24
    wide = min(110, max(48, (width + gap) / plan.depth - gap))
    return BoxSize(width=wide, height=24, gap_x=gap, gap_y=8, detailed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLabel:
    """The bytes of an edge, and the left end of their line of text."""

    x: float
    y: float
    content: str


class GraphPicture:
    """The elements of a stage graph, and the room that they need."""

    def __init__(self, plan: Plan, box: BoxSize) -> None:
        self.plan, self.box = plan, box
        self.layers = layers(plan.graph())
        self.columns = {node: column for column, nodes in enumerate(self.layers.columns) for node in nodes}
        self.unit = box.height + box.gap_y
        self.width = len(self.layers.columns) * (box.width + box.gap_x) - box.gap_x
        self.height = self.unit * max(self.layers.heights.values()) + box.height
        self.ports = _ports(plan, self.layers)
        self.labels = self._labels() if box.detailed else {}

    def elements(self, left: float, top: float) -> Iterator[str]:
        """Edges, then boxes."""
        for edge in self.plan.edges:
            if edge.src != SOURCE:
                yield from self._edge(edge, left, top)
        for stage in range(len(self.plan.stages)):
            x, y = self.corner(stage)
            yield from self._box(stage, left + x, top + y)

    def corner(self, node: GridPlace) -> svg.Point:
        """The upper left corner of a stage's box, or of the place of an edge that passes."""
        x = self.columns[node] * (self.box.width + self.box.gap_x)
        return x, self.layers.heights[node] * self.unit

    def route(self, src: int, dst: int) -> list[svg.Point]:
        """The points of an edge: the beginnings and ends of its curves, which lie between columns."""
        points: list[svg.Point] = []
        for node in self.layers.routes[src, dst]:
            x, y = self.corner(node)
            middle = y + self.box.height * self.ports.get((node, src, dst), 0.5)
            points += [(x, middle), (x + self.box.width, middle)]
        return points[1:-1]

    def _edge(self, edge: Edge, left: float, top: float) -> Iterator[str]:
        points = [(left + x, top + y) for x, y in self.route(edge.src, edge.dst)]
        yield svg.arrow(points, dashed=edge.artificial, title=_arrow(self.plan, edge))
        if label := self.labels.get((edge.src, edge.dst)):
            yield svg.text(left + label.x, top + label.y, label.content, classes="small muted halo")

    def _labels(self) -> dict[tuple[int, int], EdgeLabel]:
        """Bytes on edges, beside the stage that sends them; none where it has more edges than there is room for."""
        labels: dict[tuple[int, int], EdgeLabel] = {}
        for stage in range(len(self.plan.stages)):
            edges = [edge for edge in self.plan.edges if edge.src == stage and not edge.artificial]
            edges.sort(key=lambda edge: self.ports[stage, edge.src, edge.dst])
            x, y = self.corner(stage)
            middle = y + self.box.height / 2 + LABEL / 3
            for number, edge in enumerate(edges if len(edges) * LABEL <= self.unit else ()):
                content = size(edge.bytes.at(self.plan.stages[edge.dst].micro_batch_size))
                height = middle + LABEL * (number - (len(edges) - 1) / 2)
                labels[edge.src, edge.dst] = EdgeLabel(x=x + self.box.width + 6, y=height, content=content)
        return labels

    def _box(self, stage: int, x: float, y: float) -> Iterator[str]:
        entry, box = self.plan.stages[stage], self.box
        color = stage_color(stage)
        yield svg.rectangle(x, y, box.width, box.height, tint(color), ", ".join(entry.modules))
        yield svg.rectangle(x, y, 5, box.height, color)
        letters = int((box.width - 14) / svg.LETTER)
        title = _clipped(f"{stage} {entry.name}", int((box.width - 14) / STRONG))
        if not box.detailed:
            yield svg.text(x + 10, y + box.height / 2 + 4, title, classes="on small")
        else:
            yield svg.text(x + 12, y + 18, title, classes="on strong")
            flops = count(entry.figures.flops.at(entry.micro_batch_size))
            figures = f"{count(entry.figures.num_parameters)} params, {flops}FLOP"
            yield svg.text(x + 12, y + 34, _clipped(where(entry), letters), classes="on small")
            yield svg.text(x + 12, y + 49, _clipped(figures, letters), classes="on small")


def _ports(plan: Plan, placed: Layers) -> dict[tuple[GridPlace, int, int], float]:
    """The share of a box's height at which each edge (src, dst) leaves and enters it, so that lines end apart."""
    ports: dict[tuple[GridPlace, int, int], float] = {}
    for stage in range(len(plan.stages)):
        for end, neighbour in ((0, 1), (-1, -2)):
            touching = {route[neighbour]: pair for pair, route in placed.routes.items() if route[end] == stage}
            for number, node in enumerate(sorted(touching, key=placed.heights.__getitem__), start=1):
                src, dst = touching[node]
                ports[stage, src, dst] = number / (len(touching) + 1)
    return ports


def where(stage: Stage) -> str:
    """Devices as ranges, the numbers of replicas and of processes of each if there are several, and whether the stage
    recomputes or offloads.
    """
    shared = f", {len(stage.devices)} replicas" if len(stage.devices) > 1 else ""
    size = stage.tensor_parallel_size
    processes = f", {size} processes{' each' * (len(stage.devices) > 1)}" if size > 1 else ""
    return f"device {_ranges(stage.devices)}{shared}{processes}{f', {text}' if (text := measures(stage)) else ''}"


def _ranges(devices: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][-1] + 1:
            parts[-1].append(device)
        else:
            parts.append([device])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ",".join(map(str, part)) for part in parts)


def _clipped(name: str, most: int = 36) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}\u2026"
