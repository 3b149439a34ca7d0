"""Replicas that take whole micro-batches in turn: who does what, what travels, and how long it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.errors import PlanError, ScheduleError, VerificationError
from lightning_gpp.graph import Affine
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Action, Kind, Schedule, compile_program, lower, make_schedule
from lightning_gpp.schedules.lowering import derive_messages, parts_of
from lightning_gpp.schedules.verifier import check_coverage
from lightning_gpp.simulation import StageCosts, simulate
from tests.schedules.mirrored import mirrored_chain, round_robin, step_alone
from tests.strategies import plan_of, plans


def alone(num_replicas: int, batch_size: int, size: int = 1) -> Plan:
    """One stage on several devices."""
    return round_robin(plan_of([], [size], batch_size), [tuple(range(num_replicas))])


@pytest.mark.parametrize(
    ("num_replicas", "batch_size", "size", "numbers"),
    [
        (2, 4, 1, [[0, 2], [1, 3]]),
        (2, 5, 1, [[0, 2, 4], [1, 3]]),
        (3, 7, 1, [[0, 3, 6], [1, 4], [2, 5]]),
        (4, 10, 4, [[0], [1], [2], []]),
        (2, 5, 3, [[0], [1]]),
    ],
)
def test_whole_micro_batches_in_turn(num_replicas: int, batch_size: int, size: int, numbers: list[list[int]]) -> None:
    plan = alone(num_replicas, batch_size, size)
    assert [plan.micro_batches(0, device) for device in range(num_replicas)] == numbers
    intervals = plan.intervals(0)
    for device, mine in enumerate(numbers):
        for number, (start, stop) in enumerate(intervals):
            assert plan.share(0, device, number) == ((start, stop) if number in mine else (start, start))
    assert {(part.device, part.start, part.stop) for part in parts_of(plan, 0, batch_size)} == {
        (device, *intervals[number]) for device, mine in enumerate(numbers) for number in mine
    }


def test_replicas_run_their_own_actions_only() -> None:
    assert str(make_schedule(alone(2, 3))).splitlines() == ["0: 0F0 0B0 0F2 0B2", "1: 0F1 0B1"]
    assert str(make_schedule(alone(2, 3), training=False)).splitlines() == ["0: 0F0 0F2", "1: 0F1"]


def test_messages_between_equal_numbers_of_replicas_stay_in_their_pipeline() -> None:
    messages = derive_messages(mirrored_chain(4, 4), 4, training=True)
    assert {(str(m.producer), m.src, m.dst) for m in messages if m.edge == 0} == {
        ("0F0", 0, 1),
        ("0F1", 3, 2),
        ("0F2", 0, 1),
        ("0F3", 3, 2),
        ("1B0", 1, 0),
        ("1B1", 2, 3),
        ("1B2", 1, 0),
        ("1B3", 2, 3),
    }


def test_messages_to_a_stage_of_one_device() -> None:
    """Both pipelines send to it, and get their gradients back."""
    plan = step_alone(mirrored_chain(2, 3))
    last = [m for m in derive_messages(plan, 3, training=True) if plan.edges[m.edge].dst == 2]
    there, back = ([(str(m.producer), m.src, m.dst) for m in last if m.gradient == way] for way in (False, True))
    assert there == [("1F0", 1, 0), ("1F1", 0, 0), ("1F2", 1, 0)]
    assert back == [("2B0", 0, 1), ("2B1", 0, 0), ("2B2", 0, 1)]


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


def test_replicas_in_turn_and_replicas_that_share() -> None:
    plan = round_robin(plan_of([(0, 1)], [4, 4], 8), [(2, 3), (0, 1)])
    shared = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], round_robin=False)))
    ends = [(m.start, m.stop, m.src, m.dst) for m in derive_messages(shared, 8, training=False)]
    assert ends == [(0, 2, 2, 0), (2, 4, 2, 1), (4, 6, 3, 0), (6, 8, 3, 1)]


def test_what_cannot_be_cut_may_go_in_turn() -> None:
    """Whole micro-batches travel whole, which replicas that share could not do."""
    plan = round_robin(plan_of([(0, 1)], [2, 2], 8), [(1, 2), (0,)])
    uncut = replace(plan, edges=tuple(replace(edge, sliceable=False) for edge in plan.edges))
    assert compile_program(uncut).messages
    shared = tuple(replace(stage, round_robin=False) for stage in uncut.stages)
    with pytest.raises(PlanError, match="cannot be cut into other micro-batches"):
        compile_program(replace(uncut, stages=shared))


def test_coverage_notices_a_message_to_the_other_replica() -> None:
    program = compile_program(round_robin(plan_of([(0, 1)], [1, 1], 2), [(2, 3), (0, 1)]))
    first = program.messages[0]
    wrong = replace(program, messages=(replace(first, dst=1 - first.dst), *program.messages[1:]))
    with pytest.raises(VerificationError, match="does not fit the plan or its two actions"):
        check_coverage(wrong)


def test_an_action_of_the_other_replica_is_refused() -> None:
    plan = alone(2, 2)
    with pytest.raises(ScheduleError, match=r"device 0 lacks 0F0 0B0 and has one too many of 0F1 0B1"):
        lower(plan, Schedule.parse("0: 0F1 0B1\n1: 0F0 0B0"))


@pytest.mark.parametrize(("num_replicas", "number"), [(1, 12), (2, 12), (3, 12), (4, 12), (4, 13), (2, 1)])
def test_replicas_share_the_time(num_replicas: int, number: int) -> None:
    plan = alone(num_replicas, number)
    timeline = simulate(compile_program(plan), StageCosts.uniform(plan, 1, 2))
    assert timeline.makespan == 3 * -(-number // num_replicas)
    assert timeline.busy == tuple(3 * len(range(r, number, num_replicas)) for r in range(num_replicas))


def test_a_slow_stage_in_turn_keeps_up() -> None:
    """Three replicas of a stage that takes three times as long: a pipeline in balance after its warm-up."""
    plan = round_robin(plan_of([(0, 1)], [1, 1], 12, schedule="gpipe"), [(1, 2, 3), (0,)])
    costs = StageCosts.uniform(plan, 1, 1)
    slow = replace(costs.stages[0], forward=Affine(0, 3), backward=Affine(0, 3))
    timeline = simulate(compile_program(plan), replace(costs, stages=(slow, costs.stages[1])))
    assert timeline.makespan <= 12 + 12 + 3 + 3


def test_sums_over_replicas_with_and_without_micro_batches() -> None:
    """The fourth replica has nothing to do, and takes part in the sum."""
    program = compile_program(alone(4, 3))
    assert program.reduced == {0}
    rows = [[i.action for i in instructions if i.action is not None] for instructions in program.devices]
    assert all(row[-1] == Action(0, Kind.REDUCE, 0) for row in rows)
    assert [len(row) for row in rows] == [3, 3, 3, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "chimera"])
@pytest.mark.parametrize("num_replicas", [3, 4])
def test_three_and_four_pipelines(schedule: str, num_replicas: int) -> None:
    """A chain of as many stages, in pipelines that are rotated against each other, ends sooner than a single one."""
    number = 4 * num_replicas
    pairs = [(i, i + 1) for i in range(num_replicas - 1)]
    one = plan_of(pairs, [1] * num_replicas, number, schedule=schedule)
    turns = [tuple((stage + r) % num_replicas for r in range(num_replicas)) for stage in range(num_replicas)]
    spans = []
    for plan in (one, round_robin(one, turns), step_alone(round_robin(one, turns))):
        timeline = simulate(compile_program(plan), StageCosts.uniform(plan, 1, 2))
        assert max(timeline.busy) >= 3 * number
        spans.append(timeline.makespan)
    if schedule == "chimera":
        assert spans[1] <= spans[0]


def test_saved_and_loaded(tmp_path: Path) -> None:
    plan = step_alone(mirrored_chain(2, 4))
    plan.save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert loaded == plan
    assert [stage.round_robin for stage in loaded.stages] == [True, True, False]
    text = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "old.yaml").write_text("\n".join(line for line in text.splitlines() if "round_robin" not in line))
    assert not any(stage.round_robin for stage in Plan.load(tmp_path / "old.yaml").stages)


def test_neither_true_nor_false(tmp_path: Path) -> None:
    mirrored_chain(2, 2).save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text().replace("round_robin: true", "round_robin: sometimes")
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(PlanError, match="round_robin is 'sometimes'; it must be true or false"):
        Plan.load(tmp_path / "plan.yaml")


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
