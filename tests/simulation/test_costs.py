"""What a cluster adds to a simulation: kinds of devices, links, sums of gradients; and memory of a recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.cluster import Cluster, Device, Link, Node
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Kind, compile_program
from lightning_gpp.simulation import Collective, StageCosts, Timeline, simulate
from tests.strategies import chain, plan_of, plans

DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e9)


def _simulated(plan: Plan, costs: StageCosts, *, training: bool = True, copies: int = 1) -> Timeline:
    return simulate(compile_program(plan, training=training, copies=copies), costs)


def test_gradients_are_summed_when_all_replicas_have_ended() -> None:
    plan = plan_of([(0, 1)], (2, 2), 2, devices=[(1, 2), (0,)])
    costs = replace(StageCosts.uniform(plan, 1, 2), all_reduce=(5.0, 0.0))
    timeline = _simulated(plan, costs)
    assert timeline.reductions == (Collective(0, (1, 2), 1 + 1 + 2 + 2, 11),)
    assert timeline.makespan == 11
    assert timeline.busy == (3, 3, 3)


def test_sums_begin_while_a_device_goes_on() -> None:
    """Device 0 sums the gradients of its last stage at 4, while device 1 computes; sums of a device take turns."""
    plan = plan_of([(0, 1), (1, 2)], (1, 1, 1), 1, devices=[(0,), (1,), (0,)])
    costs = replace(StageCosts.uniform(plan), all_reduce=(1.0, 2.0, 4.0))
    starts = {entry.stage: (entry.start, entry.stop) for entry in _simulated(plan, costs, copies=2).reductions}
    assert starts == {0: (8, 9), 1: (5, 7), 2: (4, 8)}
    assert _simulated(plan, costs).reductions == ()


@settings(max_examples=40, deadline=None)
@given(plan=plans(), seconds=st.floats(0.1, 10))
def test_sums_come_after_the_last_backward_of_their_stage(plan: Plan, seconds: float) -> None:
    costs = StageCosts.uniform(plan, 1, 2)
    without = _simulated(plan, costs)
    timeline = _simulated(plan, replace(costs, all_reduce=(seconds,) * len(plan.stages)), copies=2)
    assert timeline.devices == without.devices
    assert {entry.stage for entry in timeline.reductions} == set(range(len(plan.stages)))
    for entry in timeline.reductions:
        spans = [span for device in entry.devices for span in without.devices[device]]
        ends = [span.stop for span in spans if span.action.stage == entry.stage and span.action.kind is Kind.BACKWARD]
        assert entry.start >= max(ends)
        assert entry.stop == pytest.approx(entry.start + seconds)
    assert timeline.makespan >= without.makespan


def test_links_are_those_of_the_cluster() -> None:
    """Stage 0 on device 2, of another node, stage 1 on device 1, stage 2 on device 0."""
    inside, between = Link(latency=1, bytes_per_second=4), Link(latency=10, bytes_per_second=2)
    nodes = [Node(device=DEVICE, count=2, link=inside), Node(device=DEVICE, count=1, link=inside)]
    cluster = Cluster.of_nodes("two", nodes, between, {(0, 1): Link(latency=100)})
    plan = chain((1, 1, 1), 1)
    timeline = _simulated(plan, replace(StageCosts.uniform(plan), cluster=cluster))
    seconds = {(entry.src, entry.dst): entry.stop - entry.start for entry in timeline.transfers}
    assert seconds == {(2, 1): 12, (1, 0): 2, (0, 1): 100, (1, 2): 12}
    assert timeline.makespan == 6 + 12 + 2 + 100 + 12
