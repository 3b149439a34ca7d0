from __future__ import annotations

from functools import cache
from itertools import count
from math import inf

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.planning.partitioners.series_parallel import (
    Conversion,
    Leaf,
    Parallel,
    Series,
    Tree,
    TreeNode,
    critical_path,
    decompose,
    describe,
    inline_broadcasts,
    leaves,
    make_series_parallel,
    num_ordered,
    order_of,
    parallel,
    series,
)
from lightning_gpp.planning.problem.units import find_units
from tests.planning import graphs

Pairs = set[tuple[TreeNode, TreeNode]]


def graph_of(*edges: tuple[TreeNode, TreeNode], nodes: int = 0) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges)
    return graph


def path(*nodes: TreeNode) -> list[tuple[TreeNode, TreeNode]]:
    return list(zip(nodes, nodes[1:], strict=False))


def closure(graph: nx.DiGraph) -> Pairs:
    return {(node, other) for node in graph for other in nx.descendants(graph, node)}


def described(graph: nx.DiGraph) -> str | None:
    tree = decompose(graph)
    return None if tree is None else describe(tree)


N = graph_of(("a", "c"), ("b", "c"), ("b", "d"))
CROSS_LINK = graph_of(*path(0, 1, 2, 3, 8), *path(4, 5, 6, 7, 8), (1, 6))


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (graph_of(nodes=1), "0"),
        (graph_of(nodes=3), "P(0, 1, 2)"),
        (graph_of(*path(0, 1, 2, 3)), "S(0, 1, 2, 3)"),
        (graph_of((0, 1), (0, 2), (1, 3), (2, 3)), "S(0, P(1, 2), 3)"),
        (graph_of(*path(0, 1, 2, 5), *path(0, 3, 4, 5)), "S(0, P(S(1, 2), S(3, 4)), 5)"),
        (graph_of(*path(0, 1, 2, 3, 5), *path(0, 4, 5)), "S(0, P(S(1, 2, 3), 4), 5)"),
        (graph_of(*path(0, 1, 4), *path(2, 3, 4)), "S(P(S(0, 1), S(2, 3)), 4)"),
        (graph_of((0, 2), (0, 3), (1, 2), (1, 3)), "S(P(0, 1), P(2, 3))"),
        (graph_of(*path(0, 1), *path(2, 3)), "P(S(0, 1), S(2, 3))"),
        (graph_of(*path(0, 1, 2, 5, 6), *path(1, 3, 5), *path(0, 4, 6)), "S(0, P(S(1, P(2, 3), 5), 4), 6)"),
    ],
    ids=["one", "apart", "chain", "diamond", "towers", "unequal", "sources", "bipartite", "unconnected", "nested"],
)
def test_trees_of_small_graphs(graph: nx.DiGraph, expected: str) -> None:
    assert described(graph) == expected


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (graph_of(*path(0, 1, 2), (0, 2)), "S(0, 1, 2)"),
        (graph_of(*path(0, 1, 2, 3, 4, 5, 6), (0, 6), (1, 5), (2, 4)), "S(0, 1, 2, 3, 4, 5, 6)"),
        (graph_of(*path(0, 1, 2), *path(3, 4, 5, 6), (2, 4), (2, 5), (2, 6)), "S(P(S(0, 1, 2), 3), 4, 5, 6)"),
        (graph_of(*path(0, 2, 3, 4), (1, 2), (1, 3), (1, 4)), "S(P(0, 1), 2, 3, 4)"),
    ],
    ids=["residual", "unet", "encoder_decoder", "mask"],
)
def test_edges_that_follow_from_others_do_not_count(graph: nx.DiGraph, expected: str) -> None:
    assert described(graph) == expected


@pytest.mark.parametrize("graph", [N, CROSS_LINK], ids=["n", "cross_link"])
def test_an_n_is_not_series_parallel(graph: nx.DiGraph) -> None:
    assert decompose(graph) is None


def test_a_cycle_and_an_empty_graph_are_refused() -> None:
    with pytest.raises(nx.NetworkXUnfeasible):
        decompose(graph_of((0, 1), (1, 0)))
    with pytest.raises(ValueError, match="without nodes"):
        decompose(nx.DiGraph())


def test_parallel_parts_are_sorted_by_their_first_node() -> None:
    assert described(graph_of((3, 4), (2, 4), (0, 1), nodes=5)) == "P(S(0, 1), S(P(2, 3), 4))"


def test_series_and_parallel_are_flattened() -> None:
    inner = series([Leaf(0), Leaf(1)])
    assert series([inner, Leaf(2)]) == Series((Leaf(0), Leaf(1), Leaf(2)))
    assert parallel([parallel([Leaf(0), Leaf(1)]), Leaf(2)]) == Parallel((Leaf(0), Leaf(1), Leaf(2)))
    assert parallel([inner]) is inner


def test_what_is_read_off_a_tree() -> None:
    tree = series([Leaf(0), parallel([series([Leaf(1), Leaf(2)]), Leaf(3)]), Leaf(4)])
    assert leaves(tree) == (0, 1, 2, 3, 4)
    assert critical_path(tree, {0: 1.0, 1: 2.0, 2: 3.0, 3: 7.0, 4: 1.0}) == 9.0
    assert num_ordered(tree) == 8
    assert set(order_of(tree).edges) == {(0, 1), (1, 2), (2, 4), (0, 3), (3, 4)}


def test_trees_may_be_as_deep_as_the_graph() -> None:
    numbers = count()
    tree: Tree = Leaf(next(numbers))
    for _ in range(500):
        tree = series([Leaf(next(numbers)), parallel([tree, Leaf(next(numbers))])])
    found = decompose(order_of(tree))
    assert found is not None
    assert num_ordered(found) == num_ordered(tree)
    assert critical_path(found, dict.fromkeys(range(1001), 1.0)) == 501


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    parts: list[Tree] = [Leaf(number) for number in range(draw(st.integers(1, 20)))]
    while len(parts) > 1:
        first = draw(st.integers(0, len(parts) - 2))
        end = draw(st.integers(first + 2, len(parts)))
        combine = draw(st.sampled_from([series, parallel]))
        parts[first:end] = [combine(parts[first:end])]
    return parts[0]


@given(trees(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_a_tree_gives_the_tree(tree: Tree, random: object) -> None:
    assert decompose(order_of(tree)) == tree
    full = nx.DiGraph(sorted(closure(order_of(tree)), key=repr))
    full.add_nodes_from(leaves(tree))
    again = decompose(full)
    assert again is not None
    assert closure(order_of(again)) == closure(order_of(tree))


@st.composite
def weighted(draw: st.DrawFn, most: int = 24) -> tuple[nx.DiGraph, dict[TreeNode, float]]:
    size = draw(st.integers(1, most))
    reach = draw(st.integers(1, size))
    graph = graph_of(nodes=size)
    for node in range(1, size):
        sources = draw(st.lists(st.integers(max(0, node - reach), node - 1), max_size=3))
        graph.add_edges_from((source, node) for source in sources)
    return graph, {node: draw(st.sampled_from([0.0, 0.1, 1.0, 1.5, 4.0])) for node in graph}


def ordered(graph: nx.DiGraph, inlined: tuple[TreeNode, ...]) -> Pairs:
    return {pair for pair in closure(graph) if not set(pair) & set(inlined)}


def heaviest(graph: nx.DiGraph, weights: dict[TreeNode, float]) -> float:
    ends: dict[TreeNode, float] = {}
    for node in nx.topological_sort(graph):
        ends[node] = weights[node] + max((ends[other] for other in graph.pred[node]), default=0.0)
    return max(ends.values())


def naive(graph: nx.DiGraph, weights: dict[TreeNode, float]) -> float:
    """The critical path where every depth waits for the whole depth before."""
    return sum(max(weights[node] for node in level) for level in nx.topological_generations(graph))


@given(weighted())
@settings(max_examples=150, deadline=None)
def test_conversions_contain_the_order_at_no_more_than_the_price_of_strata(
    case: tuple[nx.DiGraph, dict[TreeNode, float]],
) -> None:
    graph, weights = case
    found = make_series_parallel(graph, weights)
    kept = graph.subgraph(set(graph) - set(found.inlined))
    order = closure(order_of(found.tree))
    assert set(leaves(found.tree)) == set(kept)
    assert decompose(order_of(found.tree)) is not None
    assert ordered(graph, found.inlined) <= order
    assert not set(found.added) & ordered(graph, found.inlined)
    assert closure(graph_of(*kept.edges, *found.added)) == order
    assert found.price >= 1
    after = critical_path(found.tree, weights)
    assert after == pytest.approx(found.price * heaviest(kept, weights))
    assert after <= naive(kept, weights) * (1 + 1e-9)
    assert (decompose(graph) is not None) <= (found == Conversion(tree=found.tree, added=(), price=1.0, inlined=()))


def lightest(graph: nx.DiGraph, weights: dict[TreeNode, float]) -> float:
    """The lightest critical path of all series-parallel orders: every connected part is cut in every possible way."""
    before = {node: nx.ancestors(graph, node) for node in graph}

    @cache
    def of(part: frozenset[TreeNode]) -> float:
        if len(part) == 1:
            return weights[next(iter(part))]
        components = list(nx.weakly_connected_components(graph.subgraph(part)))
        if len(components) > 1:
            return max(of(frozenset(component)) for component in components)
        halves = {frozenset[TreeNode]()}
        for node in nx.topological_sort(graph):
            if node in part:
                halves |= {half | {node} for half in halves if before[node] & part <= half}
        return min(of(half) + of(part - half) for half in halves if half and half != part)

    return of(frozenset(graph))


@given(weighted(most=8))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_conversions_of_small_graphs_are_as_light_as_possible(case: tuple[nx.DiGraph, dict[TreeNode, float]]) -> None:
    graph, weights = case
    found = make_series_parallel(graph, weights, fraction=0.0)
    assert critical_path(found.tree, weights) == pytest.approx(lightest(graph, weights))


def test_an_n_waits_where_it_costs_least() -> None:
    found = make_series_parallel(N, {"a": 10.0, "b": 1.0, "c": 1.0, "d": 10.0})
    assert describe(found.tree) == "S(b, P(S(a, c), d))"
    assert found.added == (("b", "a"),)
    assert found.price == pytest.approx(12 / 11)


def test_a_link_between_equal_towers_costs_nothing() -> None:
    found = make_series_parallel(CROSS_LINK)
    assert describe(found.tree) == "S(P(S(0, 1), S(4, 5)), P(S(2, 3), S(6, 7)), 8)"
    assert found.added == ((5, 2),)
    assert found.price == 1.0


def test_only_the_part_that_is_not_series_parallel_changes() -> None:
    edges = [(f"{node}", f"{other}") for node, other in N.edges]
    graph = graph_of(*path("in", "x", "y", "out"), ("in", "a"), ("in", "b"), ("c", "out"), ("d", "out"), *edges)
    found = make_series_parallel(graph)
    assert found.price == 1.0
    assert {node for pair in found.added for node in pair} <= {"a", "b", "c", "d"}
    assert describe(found.tree).startswith("S(in, P(S(x, y), ")


def masked(mask: float = 0.001) -> tuple[nx.DiGraph, dict[TreeNode, float]]:
    """Layers that each read their own version of one mask."""
    layers = ["embed", "layer.0", "layer.1", "layer.2"]
    graph = graph_of(*path(*layers))
    for index, layer in enumerate(layers[1:]):
        graph.add_edges_from(path("mask", f"mask.{index}", layer))
    return graph, {node: mask if str(node).startswith("mask") else 1.0 for node in graph}


def test_broadcasts_are_inlined_into_their_readers() -> None:
    graph, weights = masked()
    assert decompose(graph) is None
    found = make_series_parallel(graph, weights)
    assert describe(found.tree) == "S(embed, layer.0, layer.1, layer.2)"
    assert found == Conversion(tree=found.tree, added=(), price=1.0, inlined=("mask", "mask.0", "mask.1", "mask.2"))


@pytest.mark.parametrize(
    ("mask", "keep", "inlined"), [(0.5, [], 0), (0.001, ["mask"], 0), (0.001, ["mask.1"], 3), (0.001, ["embed"], 4)]
)
def test_heavy_and_kept_nodes_are_not_inlined(mask: float, keep: list[TreeNode], inlined: int) -> None:
    graph, weights = masked(mask)
    found = make_series_parallel(graph, weights, keep=keep)
    assert len(found.inlined) == inlined
    assert set(leaves(found.tree)) == set(graph) - set(found.inlined)


def test_a_light_node_with_one_reader_is_no_broadcast() -> None:
    graph = graph_of(*path("ids", "embedding", "layer"))
    rest, inlined = inline_broadcasts(graph, {"ids": 0.0, "embedding": 0.001, "layer": 1.0})
    assert inlined == ()
    assert set(rest) == set(graph)


def test_series_parallel_graphs_are_not_inlined() -> None:
    graph = graph_of(*path(0, 2, 3), (1, 2), (1, 3))
    assert make_series_parallel(graph, {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}).inlined == ()


@pytest.mark.parametrize("name", ["chain", "two_towers", "feature_towers", "encoder_decoder", "unet", "gpt"])
@pytest.mark.parametrize("num_pieces", [4, inf])
def test_units_of_common_models_are_series_parallel(name: str, num_pieces: float) -> None:
    operators = getattr(graphs, name)()
    seconds = {operator.name: 1.0 + operator.flops.at(1) for operator in operators}
    units = find_units(operators, num_pieces=num_pieces, seconds=seconds)
    tree = decompose(units.graph())
    assert tree is not None
    assert closure(units.graph()) == closure(order_of(tree))


def test_a_graph_of_hundreds_of_nodes_beats_strata() -> None:
    graph = graph_of(*((node - 1 - node * node % 17 % min(node, 9), node) for node in range(1, 300)))
    graph.add_edges_from((node - 1 - node * 7 % 5, node) for node in range(6, 300, 3))
    weights: dict[TreeNode, float] = {node: 1.0 + node * node % 7 for node in graph}
    assert decompose(graph) is None
    found = make_series_parallel(graph, weights)
    assert 1 <= found.price < 1.1
    assert naive(graph, weights) > 1.3 * heaviest(graph, weights)
