"""Pipelines in both directions on graphs: no slower than the chain of the same stages, in no more room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.graph import Affine
from lightning_gpp.plan import SOURCE, STEP, Figures, Plan
from lightning_gpp.planning.assignment.layout import laid_out
from lightning_gpp.schedules import compile_program
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.simulation import StageCosts, simulate
from tests.schedules.mirrored import peaks, played, round_robin
from tests.strategies import plan_of, plans

NAMES = ("chimera", "bitpipe")


def towers_both_ways(schedule: str, num_devices: int, num_micro_batches: int) -> Plan:
    """Two towers, then two stages one after the other: as many stages as the schedule wants, in both directions."""
    method = method_of(schedule)
    number = method.stages_per_device * num_devices
    half, join = (number - 2) // 2, number - 2
    pairs = [(i, i + 1 if i + 1 not in (half, join) else join) for i in range(join)]
    plan = plan_of([*pairs, (join, join + 1)], [1] * number, num_micro_batches, schedule=schedule)
    head = replace(plan.stages[-1], modules=("head", STEP))
    plan = replace(plan, stages=(*plan.stages[:-1], head))
    places = [stage.devices[0] for stage in laid_out(plan, num_devices, method.layout).stages]
    return round_robin(plan, [(place, num_devices - 1 - place) for place in places])


@pytest.mark.parametrize(
    ("schedule", "devices", "number", "graph", "chain"),
    [
        ("chimera", 4, 8, 25, 28),
        ("bitpipe", 4, 8, 48, 54),
        ("chimera", 4, 16, 49, 52),
        ("bitpipe", 4, 16, 96, 102),
        ("chimera", 8, 16, 51, 67),
        ("bitpipe", 8, 16, 99, 118),
    ],
)
def test_towers_are_faster_than_their_chain(schedule: str, devices: int, number: int, graph: int, chain: int) -> None:
    """In the room that the chain has: of a micro-batch for each of its stages."""
    plan = towers_both_ways(schedule, devices, number)
    own, twin = played(plan), played(plan.chained())
    assert (own.makespan, twin.makespan) == (graph, chain)
    assert max(peaks(own)) <= max(peaks(twin)) <= len(plan.stages)


@st.composite
def weighed(draw: st.DrawFn) -> Plan:
    """Any plan without data, whose stages take whole micro-batches in turn or share them, with or without room."""
    plan = draw(plans(max_stages=6, max_replicas=2, max_batch=12, schedules=NAMES))
    seconds = st.integers(1, 4)
    figures = [
        Figures(
            activation_bytes=Affine(draw(st.integers(1, 3))),
            forward_seconds=Affine(draw(seconds)),
            input_seconds=Affine(draw(seconds)),
            weight_seconds=Affine(draw(seconds)),
        )
        for _ in plan.stages
    ]
    stages = (
        replace(stage, round_robin=draw(st.booleans()), figures=each)
        for stage, each in zip(plan.stages, figures, strict=True)
    )
    limits = draw(st.sampled_from([(), (6.0,) * plan.num_devices]))
    edges = tuple(edge for edge in plan.edges if edge.src != SOURCE)
    return replace(plan, stages=tuple(stages), edges=edges, memory_bytes=limits)


@settings(max_examples=60, deadline=None)
@given(plan=weighed())
def test_no_graph_is_slower_than_its_chain(plan: Plan) -> None:
    costs = StageCosts(stages=tuple(stage.figures for stage in plan.stages))
    own, twin = (simulate(compile_program(each), costs).makespan for each in (plan, plan.chained()))
    assert own <= twin * (1 + 1e-9)
