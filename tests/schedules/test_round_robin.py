"""Replicas that take whole micro-batches in turn: who does what, what travels, and how long it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.errors import PlanError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Action, Kind, compile_program, make_schedule
from lightning_gpp.schedules.lowering import derive_messages, parts_of
from lightning_gpp.simulation import StageCosts, simulate
from tests.schedules.mirrored import round_robin
from tests.strategies import plan_of, plans


def alone(num_replicas: int, batch_size: int, size: int = 1) -> Plan:
    """One stage on several devices."""
    return round_robin(plan_of([], [size], batch_size), [tuple(range(num_replicas))])


def test_replicas_run_their_own_actions_only() -> None:
    assert str(make_schedule(alone(2, 3))).splitlines() == ["0: 0F0 0B0 0F2 0B2", "1: 0F1 0B1"]
    assert str(make_schedule(alone(2, 3), training=False)).splitlines() == ["0: 0F0 0F2", "1: 0F1"]


def test_messages_between_other_sizes_and_numbers() -> None:
    """Micro-batches of 3 in turn on 2 devices, of 2 in turn on 3."""
    plan = round_robin(plan_of([(0, 1)], [3, 2], 8), [(3, 4), (0, 1, 2)])
    messages = derive_messages(plan, 8, training=False)
    assert [(str(m.producer), str(m.consumer), m.start, m.stop, m.src, m.dst) for m in messages] == [
        ("0F0", "1F0", 0, 2, 3, 0),
        ("0F0", "1F1", 2, 3, 3, 1),
        ("0F1", "1F1", 3, 4, 4, 1),
        ("0F1", "1F2", 4, 6, 4, 2),
        ("0F2", "1F3", 6, 8, 3, 0),
    ]


def test_what_cannot_be_cut_may_go_in_turn() -> None:
    """Whole micro-batches travel whole, which replicas that share could not do."""
    plan = round_robin(plan_of([(0, 1)], [2, 2], 8), [(1, 2), (0,)])
    uncut = replace(plan, edges=tuple(replace(edge, sliceable=False) for edge in plan.edges))
    assert compile_program(uncut).messages
    shared = tuple(replace(stage, round_robin=False) for stage in uncut.stages)
    with pytest.raises(PlanError, match="cannot be cut into other micro-batches"):
        compile_program(replace(uncut, stages=shared))


def test_sums_over_replicas_with_and_without_micro_batches() -> None:
    """The fourth replica has nothing to do, and takes part in the sum."""
    program = compile_program(alone(4, 3))
    assert program.reduced == {0}
    rows = [[i.action for i in instructions if i.action is not None] for instructions in program.devices]
    assert all(row[-1] == Action(0, Kind.REDUCE, 0) for row in rows)
    assert [len(row) for row in rows] == [3, 3, 3, 1]


@settings(max_examples=60, deadline=None)
@given(plan=plans(max_replicas=4), data=st.data())
def test_any_plan(plan: Plan, data: st.DataObject) -> None:
    """Parts tile the samples; every schedule compiles, and every replica is busy with what is its own."""
    flags = data.draw(st.lists(st.booleans(), min_size=len(plan.stages), max_size=len(plan.stages)))
    pairs = zip(plan.stages, flags, strict=True)
    plan = replace(plan, stages=tuple(replace(stage, round_robin=flag) for stage, flag in pairs))
    for stage in range(len(plan.stages)):
        parts = parts_of(plan, stage, plan.batch_size)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == plan.batch_size
    timeline = simulate(compile_program(plan), StageCosts.uniform(plan, 1, 2))
    assert list(timeline.busy) == [3 * _num_shares(plan, device) for device in range(plan.num_devices)]


def _num_shares(plan: Plan, device: int) -> int:
    """Micro-batches of which a device has samples."""
    parts = [part for stage in plan.stages_on(device) for part in parts_of(plan, stage, plan.batch_size)]
    return sum(part.device == device for part in parts)


@given(total=st.integers(1, 60), size=st.integers(1, 20))
def test_micro_batches_are_as_few_and_as_equal_as_possible(total: int, size: int) -> None:
    plan = alone(1, total, size)
    intervals = plan.intervals(0)
    sizes = [stop - start for start, stop in intervals]
    assert len(sizes) == -(-total // size)
    assert max(sizes) - min(sizes) <= 1
    assert [sample for start, stop in intervals for sample in range(start, stop)] == list(range(total))
    assert all(plan.micro_batch_of(0, sample) == i for i, span in enumerate(intervals) for sample in range(*span))
