from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.planning.partitioners.graphpipe.series_parallel import (
    Line,
    make_series_parallel,
)
from tests.planning.lines import order_of, parallel, series

Pairs = set[tuple[int, int]]
Weighted = tuple[nx.DiGraph, list[float]]


def graph_of(*edges: tuple[int, int], nodes: int = 0) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(max([nodes, *(node + 1 for edge in edges for node in edge)])))
    graph.add_edges_from(edges)
    return graph


def path(*nodes: int) -> list[tuple[int, int]]:
    return list(zip(nodes, nodes[1:], strict=False))


def closure(graph: nx.DiGraph) -> Pairs:
    return {(node, other) for node in graph for other in nx.descendants(graph, node)}


def described(line: Line) -> str:
    """Parts one after another; lines of a fork in brackets."""
    parts = (
        f"[{' | '.join(map(described, part.lines))}]" if not isinstance(part, int) else f"{part}" for part in line.parts
    )
    return " ".join(parts)


def converted(graph: nx.DiGraph) -> Line:
    return make_series_parallel(graph, [1.0] * len(graph))


def delay(graph: nx.DiGraph, line: Line, weights: list[float]) -> float:
    """The critical path of a line, relative to that of the graph."""
    paths = []
    for order in (order_of(line), graph):
        weighted = nx.DiGraph(("start", node, {"weight": weights[node]}) for node in order)
        weighted.add_weighted_edges_from((node, after, weights[after]) for node, after in order.edges)
        paths.append(nx.dag_longest_path_length(weighted))
    return paths[0] / paths[1]


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (graph_of(nodes=1), "0"),
        (graph_of(nodes=3), "[0 | 1 | 2]"),
        (graph_of((0, 1), (0, 2), (1, 3), (2, 3)), "0 [1 | 2] 3"),
        (graph_of(*path(0, 1, 2, 5), *path(0, 3, 4, 5)), "0 [1 2 | 3 4] 5"),
        (graph_of((0, 2), (0, 3), (1, 2), (1, 3)), "[0 | 1] [2 | 3]"),
        (graph_of(*path(0, 1, 2, 5, 6), *path(1, 3, 5), *path(0, 4, 6)), "0 [1 [2 | 3] 5 | 4] 6"),
        (graph_of(*path(0, 1, 2, 3, 4, 5, 6), (0, 6), (1, 5), (2, 4)), "0 1 2 3 4 5 6"),
        (graph_of(*path(0, 2, 3, 4), (1, 2), (1, 3), (1, 4)), "[0 | 1] 2 3 4"),
    ],
    ids=["one", "apart", "diamond", "towers", "bipartite", "nested", "unet", "mask"],
)
def test_lines_of_small_graphs(graph: nx.DiGraph, expected: str) -> None:
    assert described(converted(graph)) == expected


def test_an_n_waits_where_it_costs_least() -> None:
    graph, weights = graph_of((0, 2), (1, 2), (1, 3)), [10.0, 1.0, 1.0, 10.0]
    found = make_series_parallel(graph, weights)
    assert described(found) == "[0 | 1 3] 2"
    assert delay(graph, found, weights) == pytest.approx(12 / 11)


def test_a_link_between_equal_towers_costs_nothing() -> None:
    found = converted(graph_of(*path(0, 1, 2, 3, 8), *path(4, 5, 6, 7, 8), (1, 6)))
    assert described(found) == "[0 1 | 4 5] [2 3 | 6 7] 8"


@st.composite
def lines(draw: st.DrawFn) -> Line:
    parts = [Line((number,)) for number in range(draw(st.integers(1, 20)))]
    while len(parts) > 1:
        first = draw(st.integers(0, len(parts) - 2))
        end = draw(st.integers(first + 2, len(parts)))
        parts[first:end] = [draw(st.sampled_from([series, parallel]))(parts[first:end])]
    return parts[0]


@given(lines())
@settings(max_examples=100, deadline=None)
def test_the_order_of_a_line_gives_the_line(line: Line) -> None:
    assert converted(order_of(line)) == line


@st.composite
def weighted(draw: st.DrawFn) -> Weighted:
    size = draw(st.integers(1, 24))
    reach = draw(st.integers(1, size))
    graph = graph_of(nodes=size)
    for node in range(1, size):
        sources = draw(st.lists(st.integers(max(0, node - reach), node - 1), max_size=3))
        graph.add_edges_from((source, node) for source in sources)
    return graph, [draw(st.sampled_from([0.0, 0.1, 1.0, 1.5, 4.0])) for _ in graph]


@given(weighted())
@settings(max_examples=100, deadline=None)
def test_conversions_contain_the_order(case: Weighted) -> None:
    graph, weights = case
    found = make_series_parallel(graph, weights)
    assert set(found.units) == set(graph)
    assert closure(graph) <= closure(order_of(found))
