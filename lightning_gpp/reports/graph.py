"""The stage graph of a plan, as text and as a picture.

The picture has columns by the distance to the sink, such that no edge crosses a stage: one that spans several columns
keeps a place of its own in each column between, so it passes beside the stages; it bends only in the gaps between
columns. Orders within columns are found by barycenters (Sugiyama, Tagawa and Toda 1981).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Final

import networkx as nx

from lightning_gpp.plan import SOURCE, Edge, Plan, Stage
from lightning_gpp.reports import svg
from lightning_gpp.reports.svg import stage_color, tint
from lightning_gpp.reports.tables import measures
from lightning_gpp.reports.terminal import together, wrapped
from lightning_gpp.reports.units import count, size

GridPlace = int | tuple[int, int, int]
"""A stage, or the place (src, dst, column) of an edge in a column that it passes."""

SWEEPS: Final = 12
"""Sweeps over all columns for their orders."""

PASSAGE: Final = 0.4
"""Height of the place of an edge, in heights of a stage."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The columns of a graph.

    Args:
        columns: stages and passing edges of every column, from top to bottom.
        heights: vertical centre of each, in heights of a stage with the gap below it; the least is 0.
        routes: what every edge (src, dst) passes, both ends included.
    """

    columns: tuple[tuple[GridPlace, ...], ...]
    heights: Mapping[GridPlace, float]
    routes: Mapping[tuple[int, int], tuple[GridPlace, ...]]


def layers(graph: nx.DiGraph) -> Layers:
    """Columns by the distance to the sink: what can compute at the same time is side by side, near its reader."""
    columns = _columns(graph)
    column_of = {node: number for number, nodes in enumerate(columns) for node in nodes}
    routes: dict[tuple[int, int], tuple[GridPlace, ...]] = {}
    for src, dst in graph.edges:
        between = [(src, dst, number) for number in range(column_of[src] + 1, column_of[dst])]
        for place in between:
            columns[place[2]].append(place)
        routes[src, dst] = (src, *between, dst)
    links = nx.Graph([pair for route in routes.values() for pair in pairwise(route)])
    links.add_nodes_from(node for nodes in columns for node in nodes)
    ordered = _ordered(columns, links)
    return Layers(tuple(map(tuple, ordered)), _heights(ordered), routes)


def _columns(graph: nx.DiGraph) -> list[list[GridPlace]]:
    generations = list(nx.topological_generations(graph.reverse()))
    return [sorted(generation) for generation in reversed(generations)]


def _ordered(columns: Sequence[Sequence[GridPlace]], links: nx.Graph) -> list[list[GridPlace]]:
    """Columns in which every node is as near as possible to its neighbours, so that few edges cross."""
    ordered = [list(nodes) for nodes in columns]
    forwards = list(pairwise(range(len(ordered))))
    backwards = [(after, before) for before, after in reversed(forwards)]
    for sweep in range(SWEEPS):
        for fixed, moved in backwards if sweep % 2 else forwards:
            rank = {node: index for index, node in enumerate(ordered[fixed])}
            near = {node: [rank[other] for other in links[node] if other in rank] for node in ordered[moved]}
            centers = {node: fmean(near[node] or [index]) for index, node in enumerate(ordered[moved])}
            ordered[moved].sort(key=centers.__getitem__)
    return ordered


def _heights(columns: Sequence[Sequence[GridPlace]]) -> dict[GridPlace, float]:
    """Centres of all nodes. The stages of a column lie around the same middle, so that chains are straight lines."""
    heights: dict[GridPlace, float] = {}
    for nodes in columns:
        sizes = [1.0 if isinstance(node, int) else PASSAGE for node in nodes]
        centers = {node: end - size / 2 for node, size, end in zip(nodes, sizes, accumulate(sizes), strict=True)}
        middle = fmean(center for node, center in centers.items() if isinstance(node, int))
        heights.update({node: center - middle for node, center in centers.items()})
    top = min(heights.values(), default=0.0)
    return {node: height - top for node, height in heights.items()}


MARGIN: Final = 16

WIDTH, HEIGHT, GAP_X, GAP_Y = 178, 58, 84, 22
"""Pixels of a box, and of the gaps between boxes."""

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
    picture = GraphPicture(plan)
    width, height = picture.width + 2 * MARGIN, picture.height + 2 * MARGIN
    return svg.document(width, height, picture.elements(), label=graph_text(plan))


class GraphPicture:
    """The elements of a stage graph, and the room that they need."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.layers = plan, layers(plan.graph())
        self.columns = {node: column for column, nodes in enumerate(self.layers.columns) for node in nodes}
        self.width = len(self.layers.columns) * (WIDTH + GAP_X) - GAP_X
        self.height = (HEIGHT + GAP_Y) * max(self.layers.heights.values()) + HEIGHT
        self.ports = _ports(plan, self.layers)

    def elements(self) -> Iterator[str]:
        """Edges, then boxes."""
        for edge in self.plan.edges:
            if edge.src != SOURCE:
                yield from self._edge(edge)
        for stage in range(len(self.plan.stages)):
            yield from self._box(stage)

    def corner(self, node: GridPlace) -> svg.Point:
        """The upper left corner of a stage's box, or of the place of an edge that passes."""
        x = MARGIN + self.columns[node] * (WIDTH + GAP_X)
        return x, MARGIN + self.layers.heights[node] * (HEIGHT + GAP_Y)

    def route(self, src: int, dst: int) -> list[svg.Point]:
        """The points of an edge: the beginnings and ends of its curves, which lie between columns."""
        points: list[svg.Point] = []
        for node in self.layers.routes[src, dst]:
            x, y = self.corner(node)
            middle = y + HEIGHT * self.ports.get((node, src, dst), 0.5)
            points += [(x, middle), (x + WIDTH, middle)]
        return points[1:-1]

    def _edge(self, edge: Edge) -> Iterator[str]:
        points = self.route(edge.src, edge.dst)
        yield svg.arrow(points, dashed=edge.artificial, title=_arrow(self.plan, edge))
        siblings = sum(other.src == edge.src for other in self.plan.edges)
        if not edge.artificial and siblings * LABEL <= HEIGHT:
            (x, y), content = points[0], size(edge.bytes.at(self.plan.stages[edge.dst].micro_batch_size))
            yield svg.text(x + 6, y + LABEL / 3, content, classes="small muted halo")

    def _box(self, stage: int) -> Iterator[str]:
        entry, color, (x, y) = self.plan.stages[stage], stage_color(stage), self.corner(stage)
        yield svg.rectangle(x, y, WIDTH, HEIGHT, tint(color), ", ".join(entry.modules))
        yield svg.rectangle(x, y, 5, HEIGHT, color)
        title = _clipped(f"{stage} {entry.name}", int((WIDTH - 14) / STRONG))
        flops = count(entry.figures.flops.at(entry.micro_batch_size))
        figures = f"{count(entry.figures.num_parameters)} params, {flops}FLOP"
        letters = int((WIDTH - 14) / svg.LETTER)
        yield svg.text(x + 12, y + 18, title, classes="on strong")
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
    """Devices as ranges, the number of replicas if there are several, and whether the stage recomputes or offloads."""
    shared = f", {len(stage.devices)} replicas" if len(stage.devices) > 1 else ""
    return f"device {_ranges(stage.devices)}{shared}{f', {text}' if (text := measures(stage)) else ''}"


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
