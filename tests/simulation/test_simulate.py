"""The simulator against closed forms and against a longest-path reference."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.graph import Affine
from lightning_gpp.plan import Figures, Plan
from lightning_gpp.schedules import Action, Kind, Program, compile_program
from lightning_gpp.simulation import Link, StageCosts, simulate
from tests.strategies import chain, plan_of, plans, towers


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 9), (6, 3)])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 1)])
def test_chain_takes_its_closed_form(
    schedule: str, stages: int, micro_batches: int, forward: float, backward: float
) -> None:
    plan = chain((2,) * stages, 2 * micro_batches, schedule)
    timeline = simulate(compile_program(plan), StageCosts.uniform(plan, forward, backward))
    slots = micro_batches + stages - 1
    assert timeline.makespan == slots * (forward + backward)
    assert timeline.busy == (micro_batches * (forward + backward),) * stages
    assert timeline.bubble_fraction == pytest.approx((stages - 1) / slots)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_towers", "length"), [(2, 4), (3, 1), (4, 2)])
def test_towers_take_their_depth(schedule: str, num_towers: int, length: int) -> None:
    plan = towers(num_towers, length, 12, schedule=schedule)
    makespan = simulate(compile_program(plan), StageCosts.uniform(plan, 1, 2)).makespan
    assert makespan == (12 + length) * 3
    chained = plan.chained()
    assert (
        simulate(compile_program(chained), StageCosts.uniform(chained, 1, 2)).makespan
        == (12 + len(plan.stages) - 1) * 3
    )


def test_latency_and_bandwidth() -> None:
    """One message each way of 3 samples x 4 bytes: 0.5 s + 12 bytes / 6 bytes/s = 2.5 s."""
    plan = chain((3, 3), 3)
    costs = replace(StageCosts.uniform(plan), default_link=Link(latency=0.5, bytes_per_second=6))
    timeline = simulate(compile_program(plan), costs)
    assert timeline.makespan == 1 + 2.5 + 2 + 2.5 + 1
    assert [(t.src, t.dst, t.start, t.stop) for t in timeline.transfers] == [(1, 0, 1, 3.5), (0, 1, 5.5, 8)]


def test_transfers_of_one_pair_queue_up() -> None:
    plan = chain((1, 1), 3, "gpipe")
    costs = replace(StageCosts.uniform(plan), default_link=Link(latency=10))
    transfers = [t for t in simulate(compile_program(plan), costs).transfers if t.src == 1]
    assert [(t.start, t.stop) for t in transfers] == [(1, 11), (11, 21), (21, 31)]


def test_sends_do_not_block_computing() -> None:
    plan = chain((1, 1), 3, "gpipe")
    costs = replace(StageCosts.uniform(plan), default_link=Link(latency=10))
    spans = simulate(compile_program(plan), costs).devices[1]
    assert [(span.start, span.stop) for span in spans[:3]] == [(0, 1), (1, 2), (2, 3)]


def test_affine_costs_shares_and_empty_shares() -> None:
    plan = plan_of([], (2,), 3, devices=[(0, 1)])
    cost = Figures(forward_seconds=Affine(2, 1), input_seconds=Affine(3, 0.5))
    timeline = simulate(compile_program(plan), StageCosts(stages=(cost,)))
    durations = [{str(span.action): span.stop - span.start for span in spans} for spans in timeline.devices]
    assert durations == [
        {"0F0": 3, "0B0": 3.5, "0F1": 0, "0B1": 0},
        {"0F0": 3, "0B0": 3.5, "0F1": 3, "0B1": 3.5},
    ]


def test_peak_bytes() -> None:
    """Parameters in all their copies, and activations of the micro-batches in flight."""
    plan = chain((2, 2), 8)
    cost = Figures(activation_bytes=Affine(10, 3), parameter_bytes=100)
    costs = StageCosts(stages=(cost, cost), parameter_copies=4)
    assert simulate(compile_program(plan), costs).peak_bytes == (400 + 23, 400 + 2 * 23)
    assert simulate(compile_program(plan, training=False), costs).peak_bytes == (423, 423)
    gpipe = replace(plan, schedule="gpipe")
    assert simulate(compile_program(gpipe), costs).peak_bytes == (400 + 4 * 23, 400 + 4 * 23)


@settings(max_examples=60, deadline=None)
@given(plan=plans(), costs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=7, max_size=7))
def test_free_communication_equals_the_longest_path(plan: Plan, costs: list[tuple[int, int]]) -> None:
    stages = tuple(
        Figures(forward_seconds=Affine(0, f), input_seconds=Affine(b, 0)) for f, b in costs[: len(plan.stages)]
    )
    program = compile_program(plan)
    timeline = simulate(program, StageCosts(stages=stages))
    assert timeline.makespan == _longest_path(program, StageCosts(stages=stages))


def _longest_path(program: Program, costs: StageCosts) -> float:
    """Actions as nodes, weights on the edges into their successors: order on the device, and messages."""
    graph = nx.DiGraph()
    for device, instructions in enumerate(program.devices):
        actions = [i.action for i in instructions if i.action is not None and i.action.kind is not Kind.REDUCE]
        nodes = [*((device, action) for action in actions), "end"]
        for node, following in zip(nodes, nodes[1:], strict=False):
            graph.add_edge(node, following, weight=_seconds(program, costs, *node))
    for message in program.messages:
        weight = _seconds(program, costs, message.src, message.producer)
        graph.add_edge((message.src, message.producer), (message.dst, message.consumer), weight=weight)
    return float(nx.dag_longest_path_length(graph))


def _seconds(program: Program, costs: StageCosts, device: int, action: Action) -> float:
    start, stop = program.plan.share(action.stage, device, action.micro_batch, program.batch_size)
    cost = costs.stages[action.stage]
    by_kind = {Kind.DATA: costs.data, Kind.FORWARD: cost.forward_seconds, Kind.BACKWARD: cost.input_seconds}
    return by_kind[action.kind].at(stop - start) if stop > start else 0
