"""Series-parallel orders, built from single units."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from lightning_gpp.planning.partitioners.graphpipe.series_parallel import Fork, Line, LinePart


def series(lines: Sequence[Line]) -> Line:
    return Line(tuple(part for line in lines for part in line.parts))


def parallel(lines: Sequence[Line]) -> Line:
    """The lines side by side; a line that is a fork is as many lines."""
    if len(lines) == 1:
        return lines[0]
    flat = [branch for line in lines for branch in (_branches(line) or [line])]
    return Line((Fork(tuple(flat)),))


def _branches(line: Line) -> Sequence[Line]:
    (part, *rest) = line.parts
    return part.lines if isinstance(part, Fork) and not rest else ()


def order_of(line: Line) -> nx.DiGraph:
    """The order as a graph without implied edges."""
    graph = nx.DiGraph()
    graph.add_nodes_from(line.units)
    _connect(graph, line)
    return graph


def _connect(graph: nx.DiGraph, line: Line) -> tuple[list[int], list[int]]:
    """Add the edges of a line; returns its sources and sinks."""
    ends = [_ends(graph, part) for part in line.parts]
    for (_, sinks), (sources, _) in zip(ends, ends[1:], strict=False):
        graph.add_edges_from((sink, source) for sink in sinks for source in sources)
    return ends[0][0], ends[-1][1]


def _ends(graph: nx.DiGraph, part: LinePart) -> tuple[list[int], list[int]]:
    if isinstance(part, int):
        return [part], [part]
    ends = [_connect(graph, line) for line in part.lines]
    return [unit for sources, _ in ends for unit in sources], [unit for _, sinks in ends for unit in sinks]
