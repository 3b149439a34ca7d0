"""Where replicas meet: gatherings of sharded parameters, and sums of gradients."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from lightning_gpp.errors import VerificationError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Kind, Schedule, verify
from lightning_gpp.schedules.lowering import lower
from lightning_gpp.schedules.passes import check_collectives, with_collectives
from tests.strategies import chain, plan_of, schedule_of

BREADTH_FIRST = "0: 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"
DEPTH_FIRST = "0: 0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"
SHARDED = replace(plan_of([(0, 1)], (1, 1), 2, devices=[(0,), (0,)]), sharding="fsdp")


def test_each_stage_is_gathered_once_per_direction() -> None:
    schedule = with_collectives(SHARDED, schedule_of(BREADTH_FIRST), {0, 1})
    assert str(schedule) == "0: 0U0 1U0 0F0 0F1 1F0 1F1 1B0 1B1 1G0 0B0 0B1 0G0 0S0 1S0"


def test_going_to_and_fro_pays_for_every_jump() -> None:
    plan = replace(plan_of([(0, 1), (1, 2)], (1, 1, 1), 2, devices=[(0,)] * 3), sharding="fsdp")
    schedule = with_collectives(plan, schedule_of(DEPTH_FIRST), {0, 1, 2})
    kinds = Counter(action.kind for action in schedule.devices[0])
    assert kinds[Kind.UNSHARD] == kinds[Kind.RESHARD] == 3 + 1 + 1 + 1
    assert kinds[Kind.REDUCE] == 6
    check_collectives(plan, schedule.devices)


def test_whole_parameters_are_summed_once() -> None:
    plan = plan_of([(0, 1), (1, 2)], (1, 1, 1), 2, devices=[(0,)] * 3)
    schedule = with_collectives(plan, schedule_of(DEPTH_FIRST), {0, 2})
    assert str(schedule).endswith("2F1 2B1 2G0 1B1 0B1 0G0")
    assert Kind.UNSHARD not in {action.kind for action in schedule.devices[0]}


def test_devices_that_complete_stages_in_different_orders_sum_in_one() -> None:
    """Stage 2 is complete first where it is complete last, so it is first; device 1 need not wait for the end."""
    plan = plan_of([(0, 1), (1, 2)], (2, 2, 2), 2, devices=[(0, 1), (0, 1), (0, 1)])
    rows = schedule_of("0: 0F0 1F0 2F0 2B0 1B0 0B0\n1: 0F0 1F0 2F0 1B0 2B0 0B0")
    schedule = with_collectives(plan, rows, {0, 1, 2})
    assert str(schedule).splitlines() == [
        "0: 0F0 1F0 2F0 2B0 2G0 1B0 1G0 0B0 0G0",
        "1: 0F0 1F0 2F0 1B0 2B0 2G0 1G0 0B0 0G0",
    ]
    check_collectives(plan, schedule.devices)


def test_a_replica_without_micro_batches_takes_part() -> None:
    plan = plan_of([(0, 1)], (1, 1), 1, devices=[(0, 1), (0, 1)])
    rows = schedule_of("0: 0F0 1F0 1B0 0B0\n1:")
    assert str(with_collectives(plan, rows, {0, 1})) == "0: 0F0 1F0 1B0 1G0 0B0 0G0\n1: 1G0 0G0"
    sharded = with_collectives(replace(plan, sharding="fsdp"), rows, {0, 1})
    assert str(sharded) == "0: 0U0 1U0 0F0 1F0 1B0 0B0 0S0 1S0 1G0 0G0\n1: 0U0 1U0 0S0 1S0 1G0 0G0"


def test_devices_that_visit_stages_in_different_orders_gather_once() -> None:
    plan = replace(plan_of([(0, 1)], (2, 2), 2, devices=[(0, 1), (0, 1)]), sharding="fsdp")
    rows = schedule_of("0: 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1\n1: 0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1")
    schedule = with_collectives(plan, rows, {0, 1})
    for device, row in enumerate(schedule.devices):
        assert [str(action) for action in row[:2]] == ["0U0", "1U0"]
        assert [action.kind for action in row].count(Kind.UNSHARD) == 2, device
    check_collectives(plan, schedule.devices)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ("0: 0U0 0S0 0F0 0B0 0G0", "Device 0 runs 0F0 while the stage's parameters are sharded"),
        ("0: 0U0 0F0 0G0 0B0 0S0", r"Device 0 computes gradients of stages \[0\] after their last reduction"),
    ],
)
def test_refused(rows: str, match: str) -> None:
    plan = replace(chain((1,), 1), sharding="fsdp")
    with pytest.raises(VerificationError, match=match):
        verify(lower(plan, schedule_of(rows)))


def test_replicas_with_different_collectives_are_refused() -> None:
    plan = plan_of([], (2,), 2, devices=[(0, 1)])
    with pytest.raises(VerificationError, match="replicas of stage 'stage0' do not all take part"):
        verify(lower(plan, schedule_of("0: 0F0 0B0 0G0\n1: 0F0 0B0")))


def test_cycles_of_collectives_are_refused() -> None:
    plan = plan_of([(0, 1)], (2, 2), 2, devices=[(0, 1), (0, 1)])
    rows = schedule_of("0: 0F0 1F0 1B0 1G0 0B0 0G0\n1: 0F0 1F0 1B0 0B0 0G0 1G0")
    with pytest.raises(VerificationError, match="in different orders"):
        verify(lower(plan, rows))


def _in_turn() -> tuple[Plan, Schedule]:
    """Stage 1 takes turns on devices 0 and 1; device 1 makes the input of device 0 after its own turn."""
    plan = replace(plan_of([(0, 1)], (1, 1), 2, devices=[(1,), (0, 1)]), sharding="fsdp")
    first, last = plan.stages
    rows = schedule_of("0: 1F0 1B0\n1: 0F1 1F1 1B1 0F0 0B1 0B0")
    return replace(plan, stages=(first, replace(last, round_robin=True))), rows


def test_a_reduction_that_waits_for_a_later_message_is_refused() -> None:
    plan, rows = _in_turn()
    schedule = with_collectives(plan, rows, {1})
    assert str(schedule).splitlines()[1] == "1: 0F1 1U0 1F1 1B1 1G0 0F0 0B1 0B0 1S0"
    with pytest.raises(
        VerificationError, match="The program deadlocks: device 1 waits in 1G0 for the other replicas of stage 1"
    ):
        verify(lower(plan, schedule))


def test_collectives_apart_from_the_actions_never_deadlock() -> None:
    plan, rows = _in_turn()
    schedule = with_collectives(plan, rows, {1}, apart=True)
    assert str(schedule).splitlines()[0] == "0: 1U0 1F0 1B0 1S0 1G0"
    verify(lower(plan, schedule))
