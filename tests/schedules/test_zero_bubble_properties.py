"""Zero bubble and its relatives on any plan: they verify, keep their promises and their room, and run to the end."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_gpp.graph import Affine
from lightning_gpp.plan import Figures, Plan, Stage
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, Timeline, simulate
from tests.strategies import chain, plans

NAMES = ("zb_h1", "zb_h2", "zero_bubble", "layerpipe")
RUNS = settings(max_examples=60, deadline=None)


@st.composite
def weighed(draw: st.DrawFn) -> Plan:
    """Any plan, with figures for some stages, seconds for messages, and sometimes a limit for memory."""
    plan = draw(plans(schedules=NAMES))
    plan = replace(
        plan,
        stages=tuple(_weighed(draw, plan, stage) for stage in plan.stages),
        edges=tuple(replace(edge, seconds=Affine(0, draw(st.sampled_from([0, 0.5, 3])))) for edge in plan.edges),
    )
    limits = st.tuples(*[st.integers(0, 60)] * plan.num_devices)
    return replace(plan, memory_bytes=draw(st.sampled_from([(), draw(limits)])))


def _weighed(draw: st.DrawFn, plan: Plan, stage: Stage) -> Stage:
    kept = draw(st.integers(0, 4))
    figures = Figures(
        forward_seconds=Affine(draw(st.integers(0, 3)), draw(st.sampled_from([0, 0.3]))),
        input_seconds=Affine(draw(st.integers(0, 3))),
        weight_seconds=Affine(draw(st.integers(0, 2))),
        activation_bytes=Affine(kept),
        pending_bytes=Affine(draw(st.integers(0, kept))),
    )
    last = stage is plan.stages[-1]
    return replace(
        stage,
        round_robin=draw(st.booleans()),
        recompute=not last and draw(st.booleans()),
        figures=draw(st.sampled_from([Figures(), figures])),
    )


@RUNS
@given(plan=weighed(), room=st.integers(1, 6))
def test_room_is_kept_where_stages_have_devices_of_their_own(plan: Plan, room: int) -> None:
    """With one size of micro-batches nothing ever has to go beyond room for one; and no plan hangs for lack of it."""
    number = len(plan.stages)
    stages = tuple(
        replace(
            stage,
            devices=(number - 1 - i,),
            micro_batch_size=1,
            round_robin=False,
            recompute=False,
            figures=replace(stage.figures, activation_bytes=Affine(5), pending_bytes=Affine(2)),
        )
        for i, stage in enumerate(plan.stages)
    )
    edges = tuple(replace(edge, differentiable=edge.src >= 0) for edge in plan.edges)
    plan = replace(plan, stages=stages, edges=edges, memory_bytes=(5 * room,) * number, schedule="zero_bubble")
    cost = Figures(activation_bytes=Affine(5), pending_bytes=Affine(2))
    timeline = simulate(compile_program(plan), StageCosts(stages=(cost,) * number))
    assert max(timeline.peak_bytes) <= 5 * room


@settings(max_examples=40, deadline=None)
@given(times=st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=2, max_size=5), number=st.integers(1, 12))
@example(times=[(3, 6, 9), (3, 9, 1), (4, 9, 1)], number=4)
def test_uneven_chains_never_take_longer_than_under_1f1b(times: list[tuple[int, int, int]], number: int) -> None:
    plan = chain((1,) * len(times), number, "zero_bubble")
    names = ("forward_seconds", "input_seconds", "weight_seconds")
    figures = [Figures(**{name: Affine(cost) for name, cost in zip(names, row, strict=True)}) for row in times]
    stages = tuple(replace(stage, figures=row) for stage, row in zip(plan.stages, figures, strict=True))
    plan = replace(plan, stages=stages)
    costs = StageCosts(stages=tuple(figures))
    usual = simulate(compile_program(replace(plan, schedule="1f1b")), costs)
    assert _longest(simulate(compile_program(plan), costs)) <= _longest(usual)


def _longest(timeline: Timeline) -> float:
    return max(spans[-1].stop - spans[0].start for spans in timeline.devices)
