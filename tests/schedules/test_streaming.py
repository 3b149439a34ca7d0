"""Inference that never flushes: the period of forwards, on any stage graph, and the absence of bubbles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import compile_program, verify
from lightning_gpp.schedules.continuous import streaming_program, unrolled
from lightning_gpp.simulation import StageCosts, simulate
from tests.schedules.test_continuous import PLANS, REPLICATED, text_of
from tests.strategies import chain, plan_of, plans, towers

WHOLE = 1 << 30
"""The micro-batch size of a step that runs once per mini-batch."""

WHOLE_STEP = plan_of([(0, 1), (1, 2), (2, 3)], [1, 1, 1, WHOLE], 4, devices=[(2,), (1,), (0,), (0,)], data=True)
LOOPED = plan_of([(0, 1), (1, 2), (2, 3)], [1] * 4, 4, devices=[(0,), (1,), (1,), (0,)], data=True)
STREAMED = {**PLANS, "the step once per mini-batch": WHOLE_STEP, "there and back": LOOPED, "wide": towers(4, 1, 2)}


LATE = plan_of(
    [(0, 1), (0, 3), (0, 4), (1, 2), (2, 3), (3, 4), (4, 5)],
    [5, 5, 3, 1, 3, 2],
    11,
    devices=[(1,), (2, 0, 3), (2, 3, 1), (0, 1, 4), (3, 2), (0, 1, 2)],
    data=True,
)
"""Takes longer than other plans until its order repeats."""


def pace(plan: Plan) -> float:
    """Simulated time between the ends of two mini-batches, where every forward takes one unit."""
    program, costs = streaming_program(plan), StageCosts.uniform(plan, 1, 1)
    number = program.lead + 2
    some, more = (simulate(unrolled(program, n), costs).makespan for n in (number, number + 4))
    return (more - some) / 4


def test_the_period_of_a_chain() -> None:
    program = streaming_program(chain([1] * 4, 2))
    assert [text_of(program, device) for device in (3, 2, 1, 0)] == [
        "0F0''' 0F1'''",
        "1F0'' 1F1''",
        "2F0' 2F1'",
        "3F0 3F1",
    ]


def test_data_are_read_before_their_turn() -> None:
    assert text_of(streaming_program(WHOLE_STEP), 0) == "2F1 2F2 2F3 3D0'' 3F0 2F0'"


@settings(max_examples=25, deadline=None)
@given(plans(max_stages=6, detached=False))
@example(LATE)
def test_random_graphs(plan: Plan) -> None:
    size = max(stage.micro_batch_size for stage in plan.stages)
    plan = replace(plan, batch_size=2 * size + (size > 1))
    program = streaming_program(plan)
    for number in (program.lead + 4, program.lead + 7):
        verify(unrolled(program, number))


@pytest.mark.parametrize("name", STREAMED)
def test_a_period_has_no_bubble(name: str) -> None:
    """The busiest device decides the pace."""
    plan = STREAMED[name]
    work = [
        sum(len(plan.micro_batches(stage, device)) for stage in plan.stages_on(device))
        for device in range(plan.num_devices)
    ]
    assert pace(plan) == pytest.approx(max(work))


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_one_micro_batch_per_mini_batch_is_as_fast_as_the_depth(depth: int) -> None:
    """A flush costs D - 1 of D slots."""
    plan = chain([1] * depth, 1)
    flushed = simulate(compile_program(plan, training=False), StageCosts.uniform(plan, 1, 1)).makespan
    assert flushed / pace(plan) == pytest.approx(depth)


def test_what_cannot_stream_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"strategy.sharding=fsdp .* in evaluation strategy.streaming=false"):
        streaming_program(replace(REPLICATED, sharding="fsdp"))
    in_turn = tuple(replace(stage, round_robin=index == 0) for index, stage in enumerate(REPLICATED.stages))
    with pytest.raises(ScheduleError, match=r"2 replicas that take micro-batches of 2 samples in turn"):
        streaming_program(replace(REPLICATED, stages=in_turn), 6)
