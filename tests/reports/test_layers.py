"""No edge of a drawn stage graph crosses a box, whatever the graph."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.plan import Edge, Plan, Stage
from lightning_gpp.reports.graph import GAP_X, HEIGHT, WIDTH, GraphPicture, layers


@st.composite
def graphs(draw: st.DrawFn) -> nx.DiGraph:
    """Graphs of up to ten stages with one sink, as those of plans."""
    number = draw(st.integers(1, 10))
    pairs = [(src, dst) for dst in range(number) for src in range(dst)]
    graph = nx.DiGraph(draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else [])
    graph.add_nodes_from(range(number))
    graph.add_edges_from((stage, number - 1) for stage in range(number - 1) if not graph.out_degree(stage))
    return graph


def plan_of(graph: nx.DiGraph) -> Plan:
    last = graph.number_of_nodes() - 1
    stages = tuple(
        Stage(name=f"s{i}", modules=(f"m{i}",) if i < last else ("@step",), devices=(last - i,), micro_batch_size=1)
        for i in range(last + 1)
    )
    edges = tuple(Edge(src=src, dst=dst) for src, dst in sorted(graph.edges))
    return Plan(stages=stages, edges=edges, batch_size=2, schedule="1f1b")


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_no_edge_crosses_a_box(graph: nx.DiGraph) -> None:
    """Curves stay in the gaps between columns; straight lines pass columns beside their boxes."""
    picture = GraphPicture(plan_of(graph))
    boxes = [(*picture.corner(stage), stage) for stage in graph]
    for src, dst in graph.edges:
        points = picture.route(src, dst)
        for (start, _), (stop, _) in zip(points[::2], points[1::2], strict=True):
            assert stop - start == GAP_X
            assert not any(start < x < stop or x <= start < x + WIDTH for x, _, _ in boxes)
        for (x, y), (_, other) in zip(points[1:-1:2], points[2::2], strict=True):
            assert y == other
            assert not any(x == left and top <= y <= top + HEIGHT for left, top, _ in boxes)


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_boxes_do_not_overlap(graph: nx.DiGraph) -> None:
    placed = layers(graph)
    for column in placed.columns:
        heights = [placed.heights[node] for node in column if isinstance(node, int)]
        assert all(below - above >= 1 - 1e-9 for above, below in zip(heights, heights[1:], strict=False))
    assert sorted(node for column in placed.columns for node in column if isinstance(node, int)) == sorted(graph)


def test_a_chain_is_a_straight_line() -> None:
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 3), (0, 3), (1, 3)])
    heights = layers(graph).heights
    assert max(heights[stage] for stage in range(4)) - min(heights[stage] for stage in range(4)) < 0.1


def test_branches_are_side_by_side_and_do_not_cross() -> None:
    placed = layers(nx.DiGraph([(0, 3), (1, 4), (2, 4), (3, 5), (4, 5)]))
    assert [sorted(map(str, column)) for column in placed.columns] == [["0", "1", "2"], ["3", "4"], ["5"]]
    order = list(placed.columns[0])
    assert abs(order.index(1) - order.index(2)) == 1
