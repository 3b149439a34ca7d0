"""The stage graph of a plan, as text and as a picture.

The picture has columns by the distance to the sink, such that no edge crosses a stage: one that spans several columns
passes them in a lane of its own below them. In a column, stages are in the order of what they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Final

import networkx as nx

from lightning_gpp.plan import SOURCE, Edge, Plan, Stage
from lightning_gpp.reports import svg
from lightning_gpp.reports.svg import stage_color, tint
from lightning_gpp.reports.tables import measures
from lightning_gpp.reports.terminal import together, wrapped
from lightning_gpp.reports.units import count, ranges, size

MARGIN: Final = 16

WIDTH, HEIGHT, GAP_X, GAP_Y = 178, 58, 70, 22
"""Pixels of a box, which is wider where names need it, and of the gaps between boxes."""

ROOM: Final = svg.PIXELS - 2 * MARGIN

MOST: Final = 4
"""The most columns side by side."""

LABEL: Final = 13
"""Height of a line of small text, and of a lane."""

STRONG: Final = 7.6
"""Width of a strong letter, on average, in the widest of usual fonts."""


def graph_text(plan: Plan, width: int | None = None) -> str:
    """One line per level of the stage graph, one arrow per edge: stages of one level can compute at the same time.

    Args:
        plan: the plan.
        width: characters of a line, longer ones are broken; None: any number.
    """
    lines = []
    for number, level in enumerate(map(sorted, nx.topological_generations(plan.graph()))):
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
    """The elements of a stage graph, and the room that they need.

    Columns that find no room go on in a further band below. What passes boxes on its way to the right, or to another
    band, does so in a lane below a band.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.columns = plan, columns(plan.graph())
        bands = -(-len(self.columns) // MOST)
        self.per_band, side = -(-len(self.columns) // bands), GAP_X * (bands > 1)
        letters = max(len(self._title(stage)) for stage in range(len(plan.stages)))
        self.box = max(WIDTH, min(14 + STRONG * letters, (ROOM - 2 * side + GAP_X) / self.per_band - GAP_X))
        self.width = 2 * side + self.per_band * (self.box + GAP_X) - GAP_X
        pairs = [(edge.src, edge.dst) for edge in plan.edges if edge.src != SOURCE]
        self.ends, self.starts = _ports(pairs, 0), _ports(pairs, 1)
        self.corners, self.lanes = dict[int, svg.Point](), dict[tuple[int, int], list[float]]()
        top: float = MARGIN
        for first in range(0, len(self.columns), self.per_band):
            top = self._band(first, MARGIN + side, top)
            for pair in self._passing(pairs, first):
                top += LABEL
                self.lanes.setdefault(pair, []).append(top)
            top += LABEL
        self.height = top - LABEL - MARGIN

    def _band(self, first: int, left: float, top: float) -> float:
        """Place the boxes of the band that begins with column `first`; returns its lower edge."""
        band = self.columns[first : first + self.per_band]
        most = max(map(len, band))
        for x, stages in enumerate(band):
            for y, stage in enumerate(stages):
                row = y + (most - len(stages)) / 2
                self.corners[stage] = (left + x * (self.box + GAP_X), top + row * (HEIGHT + GAP_Y))
        return top + most * (HEIGHT + GAP_Y) - GAP_Y

    def _passing(self, pairs: Sequence[tuple[int, int]], first: int) -> Iterator[tuple[int, int]]:
        """The edges that pass below a band: from it to a further column than the next, or down to the next band."""
        column_of = {stage: column for column, stages in enumerate(self.columns) for stage in stages}
        for pair in pairs:
            (start, stop), after = (column_of[stage] for stage in pair), first + self.per_band
            leaves = first <= start < after and (stop > start + 1 or stop >= after)
            if leaves or (start < first and after <= stop < after + self.per_band):
                yield pair

    def elements(self) -> Iterator[str]:
        """Edges, then boxes."""
        for edge in self.plan.edges:
            if edge.src != SOURCE:
                yield from self._edge(edge)
        for stage in range(len(self.plan.stages)):
            yield from self._box(stage)

    def route(self, src: int, dst: int) -> list[svg.Point]:
        """The points of an edge: the beginnings and ends of its curves, which lie between columns."""
        (left, top), (right, other) = self.corners[src], self.corners[dst]
        start = left + self.box, top + HEIGHT * self.ends[src, dst]
        end = right, other + HEIGHT * self.starts[src, dst]
        ys = self.lanes.get((src, dst), [])
        if not ys:
            return [start, end]
        beside = [(MARGIN + 4 * (list(self.lanes).index((src, dst)) % 8), y) for y in ys if len(ys) > 1]
        return [start, (start[0] + GAP_X, ys[0]), *beside, (right - GAP_X, ys[-1]), end]

    def _edge(self, edge: Edge) -> Iterator[str]:
        points = self.route(edge.src, edge.dst)
        yield svg.arrow(points, dashed=edge.artificial, title=_arrow(self.plan, edge))
        siblings = sum(other.src == edge.src for other in self.plan.edges)
        if not edge.artificial and (siblings * LABEL <= HEIGHT or len(points) > 2):
            content = size(edge.bytes.at(self.plan.stages[edge.dst].micro_batch_size))
            yield svg.text(*self._beside(points), content, classes="small muted halo")

    def _beside(self, points: Sequence[svg.Point]) -> svg.Point:
        """The place of an edge's label: over its beginning, or under it where it rises; over its lane below a box."""
        (x, y), (_, other), *lane = points
        if not lane:
            return x + 5, y + (LABEL - 2 if other < y else -4)
        return x - self.box / 2 if lane[0][0] < x else x + GAP_X + 5, other - 2

    def _title(self, stage: int) -> str:
        return f"{stage} {self.plan.stages[stage].name}"

    def _box(self, stage: int) -> Iterator[str]:
        entry, color, (x, y) = self.plan.stages[stage], stage_color(stage), self.corners[stage]
        yield svg.rectangle(x, y, self.box, HEIGHT, tint(color), ", ".join(entry.modules))
        yield svg.rectangle(x, y, 5, HEIGHT, color)
        flops = count(entry.figures.flops.at(entry.micro_batch_size))
        figures = f"{count(entry.figures.num_parameters)} params, {flops}FLOP"
        for line, content, letter, classes in (
            (18, self._title(stage), STRONG, "on strong"),
            (34, where(entry), svg.LETTER, "on small"),
            (49, figures, svg.LETTER, "on small"),
        ):
            yield svg.text(x + 12, y + line, _clipped(content, int((self.box - 14) / letter)), classes=classes)


def columns(graph: nx.DiGraph) -> list[list[int]]:
    """Columns by the distance to the sink: what can compute at the same time is side by side, near its reader."""
    found, rows = list[list[int]](), dict[int, float]()
    for generation in reversed(list(nx.topological_generations(graph.reverse()))):
        near = {stage: [rows[other] for other in graph.predecessors(stage)] or [stage] for stage in generation}
        found.append(sorted(generation, key=lambda stage: (fmean(near[stage]), stage)))
        rows |= {stage: row - len(generation) / 2 for row, stage in enumerate(found[-1])}
    return found


def _ports(pairs: Sequence[tuple[int, int]], end: int) -> dict[tuple[int, int], float]:
    """The share of a box's height at which each edge (src, dst) leaves it, or with `end` 1 enters it."""
    together = {pair: sorted(other for other in pairs if other[end] == pair[end]) for pair in pairs}
    return {pair: (others.index(pair) + 1) / (len(others) + 1) for pair, others in together.items()}


def where(stage: Stage) -> str:
    """Devices as ranges, the number of replicas if there are several, and whether the stage recomputes or offloads."""
    shared = f", {len(stage.devices)} replicas" if len(stage.devices) > 1 else ""
    return f"device {ranges(stage.devices)}{shared}{f', {text}' if (text := measures(stage)) else ''}"


def _clipped(name: str, most: int = 36) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}\u2026"
