"""Breadth-first, interleaved 1F1B and Hanayo: published orders, closed forms, and any plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleLoopedBFS

from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assignment.layout import laid_out
from lightning_gpp.schedules import Action, Kind, compile_program, make_schedule
from lightning_gpp.schedules.interleaved import group_size
from lightning_gpp.simulation import StageCosts, Timeline, simulate
from tests.strategies import action_of, chain, plans, towers

NAMES = ("breadth_first", "interleaved", "hanayo")


def folded(schedule: str, num_devices: int, stages_per_device: int, micro_batches: int) -> Plan:
    """A chain laid on devices, forth and back for hanayo; the step shares its stage with modules."""
    plan = _with_modules(chain((1,) * num_devices * stages_per_device, micro_batches, schedule))
    return laid_out(plan, num_devices, "zigzag" if schedule == "hanayo" else "looped")


def _with_modules(plan: Plan) -> Plan:
    return replace(plan, stages=(*plan.stages[:-1], replace(plan.stages[-1], modules=("head", STEP))))


def computed(plan: Plan) -> dict[int, str]:
    """The order of every device, by its lowest stage: on a chain in a loop its place in the loop."""
    rows = make_schedule(plan).devices
    return {min(action.stage for action in row): " ".join(map(str, row)) for row in rows}


def full(plan: Plan, stages_per_device: int) -> Timeline:
    """Forward 1, backward 2 for the stages of a device together."""
    return simulate(compile_program(plan), StageCosts.uniform(plan, 1 / stages_per_device, 2 / stages_per_device))


def overhead(timeline: Timeline) -> float:
    return timeline.makespan / max(timeline.busy) - 1


def live(timeline: Timeline) -> int:
    """The most micro-batches in flight on a device, over all of its stages."""
    signs = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
    return max(max(accumulate(signs.get(span.action.kind, 0) for span in spans)) for spans in timeline.devices)


@pytest.mark.parametrize(("num_devices", "chunks", "micro_batches"), [(2, 2, 4), (3, 2, 6), (4, 2, 8), (4, 4, 4)])
def test_orders_equal_those_of_torch(num_devices: int, chunks: int, micro_batches: int) -> None:
    """Torch's breadth-first runs the micro-batches of a backward in falling order, ours in rising order."""
    for rank in range(num_devices):
        settings = SimpleNamespace(
            pp_group_size=num_devices,
            n_local_stages=chunks,
            microbatches_per_round=num_devices,
            _n_microbatches=micro_batches,
            _stages=[None] * chunks,
        )
        theirs = ScheduleInterleaved1F1B._calculate_single_rank_operations(settings, rank)
        ours = computed(folded("interleaved", num_devices, chunks, micro_batches))[rank]
        assert ours == " ".join(str(action) for action in theirs if action)
        theirs = ScheduleLoopedBFS._calculate_single_rank_operations(settings, rank)
        actions = [action_of(str(action)) for action in theirs if action]
        rising = [_mirrored(action, micro_batches) for action in actions]
        assert computed(folded("breadth_first", num_devices, chunks, micro_batches))[rank] == " ".join(map(str, rising))


def _mirrored(action: Action, micro_batches: int) -> Action:
    if action.kind is Kind.FORWARD:
        return action
    return action._replace(micro_batch=micro_batches - 1 - action.micro_batch)


@pytest.mark.parametrize(
    ("schedule", "layout", "micro_batches", "expected", "most", "gathered", "summed"),
    [
        ("1f1b", (4, 1), 8, 3 / 8, 4, 1, 1),
        ("interleaved", (4, 4), 8, 3 / 32, 4.75, 12, 8),
        ("breadth_first", (4, 4), 8, 3 / 32, 8, 6, 4),
        ("interleaved", (4, 4), 16, 3 / 64, 4.75, 20, 16),
        ("breadth_first", (4, 4), 16, 3 / 64, 16, 6, 4),
        ("interleaved", (8, 4), 16, 7 / 64, 9.75, 12, 8),
        ("breadth_first", (8, 4), 16, 7 / 64, 16, 6, 4),
        ("interleaved", (4, 4), 4, 3 / 16, 4, 6, 4),
        ("breadth_first", (4, 4), 4, 3 / 16, 4, 6, 4),
    ],
)
def test_what_a_loop_costs(
    schedule: str,
    layout: tuple[int, int],
    micro_batches: int,
    expected: float,
    most: float,
    gathered: int,
    summed: int,
) -> None:
    """Time over the ideal is (p - 1) / (m v); breadth-first pays with memory, interleaved with collectives."""
    plan = folded(schedule, *layout, micro_batches)
    timeline = full(plan, layout[1])
    assert overhead(timeline) == pytest.approx(expected)
    assert live(timeline) / layout[1] == most
    sharded = make_schedule(replace(plan, sharding="fsdp"), replicated=set(range(len(plan.stages))))
    counts = [Counter(action.kind for action in actions) for actions in sharded.devices]
    assert {(count[Kind.UNSHARD], count[Kind.REDUCE]) for count in counts} == {(gathered, summed)}


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("waves", [1, 2, 4])
def test_what_waves_cost(num_devices: int, waves: int) -> None:
    """With as many micro-batches as devices p the time over the ideal is 2(p - 1) / (3 p W) for W waves."""
    timeline = full(folded("hanayo", num_devices, 2 * waves, num_devices), 2 * waves)
    assert overhead(timeline) == pytest.approx(2 * (num_devices - 1) / (3 * num_devices * waves))
    assert live(timeline) / (2 * waves) <= num_devices


def test_a_single_stage_per_device_is_1f1b() -> None:
    plan = towers(2, 2, 6, schedule="interleaved")
    assert make_schedule(plan) == make_schedule(replace(plan, schedule="1f1b"))


def test_branches_shorten_the_loop() -> None:
    """Two towers of 8 stages and a head on 4 devices: groups of 2 rather than 4, and less in flight than as a chain."""
    plan = _with_modules(towers(2, 8, 16, schedule="interleaved"))
    graph, line = laid_out(plan, 4, "looped"), laid_out(plan.chained(), 4, "looped")
    assert (group_size(graph), group_size(line)) == (2, 4)
    assert live(full(graph, 1)) < live(full(line, 1))


@st.composite
def placed(draw: st.DrawFn) -> Plan:
    """Any plan, stages where they may be; or each on one device, laid in a loop or forth and back."""
    plan = draw(plans(schedules=NAMES, max_replicas=draw(st.sampled_from([1, 3]))))
    if draw(st.booleans()):
        plan = replace(plan, stages=tuple(replace(stage, round_robin=draw(st.booleans())) for stage in plan.stages))
    if len(plan.stages) > 1 and all(len(stage.devices) == 1 for stage in plan.stages) and draw(st.booleans()):
        number = draw(st.integers(1, len(plan.stages) - 1))
        plan = laid_out(plan, number, draw(st.sampled_from(["looped", "zigzag"])))
    return plan


@settings(max_examples=60, deadline=None)
@given(plan=placed())
def test_orders_of_stages_rise(plan: Plan) -> None:
    """Gradients sum up as in a loop over the micro-batches."""
    for actions in make_schedule(plan).devices:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            for stage in range(len(plan.stages)):
                numbers = [a.micro_batch for a in actions if (a.stage, a.kind) == (stage, kind)]
                assert numbers == sorted(numbers)
