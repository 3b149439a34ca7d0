"""No edge of a drawn stage graph crosses a box, whatever the graph."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
from hypothesis import given, settings

from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.planning import manual
from lightning_gpp.reports.graph import GAP_X, HEIGHT, LABEL, ROOM, WIDTH, GraphPicture, columns
from tests.planning import graphs
from tests.strategies import plans


@settings(max_examples=60, deadline=None)
@given(plans())
def test_no_edge_crosses_a_box(plan: Plan) -> None:
    """Curves stay in the gaps between columns; straight lines pass below a band, each at its own height."""
    picture, heights = GraphPicture(plan), list[float]()
    assert sorted(stage for column in picture.columns for stage in column) == list(range(len(plan.stages)))
    for column in picture.columns:
        tops = [picture.corners[stage][1] for stage in column]
        assert all(below - above > HEIGHT for above, below in pairwise(tops))
    for src, dst in {(edge.src, edge.dst) for edge in plan.edges if edge.src != SOURCE}:
        points = picture.route(src, dst)
        for (start, _), (stop, _) in zip(points[::2], points[1::2], strict=True):
            assert stop - start in (GAP_X, 0)
            assert not any(start < x < stop or x <= start < x + picture.box for x, _ in picture.corners.values())
        for (_, y), (_, other) in zip(points[1:-1:2], points[2::2], strict=True):
            assert y == other
            assert not any(top <= y <= top + HEIGHT for _, top in picture.corners.values())
            heights.append(y)
    assert len(set(heights)) == len(heights)
    assert picture.width <= ROOM


def test_long_chains_are_folded_and_boxes_have_room_for_names() -> None:
    stages = [{"name": f"a_long_name_of_stage_{k}", "modules": [f"blocks.{k}"]} for k in range(9)]
    plan = manual(graphs.chain(9), stages, batch_size=4)
    picture = GraphPicture(plan)
    assert [len({y for _, y in picture.corners.values()}), len(picture.columns)] == [3, 9]
    assert picture.box > WIDTH
    assert picture.height < 3 * (HEIGHT + 3 * LABEL)


def test_branches_are_side_by_side_and_do_not_cross() -> None:
    assert columns(nx.DiGraph([(0, 4), (1, 3), (2, 3), (3, 5), (4, 5)])) == [[0, 1, 2], [4, 3], [5]]
