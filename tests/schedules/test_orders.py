"""Schedules, literally: orders and warm-ups as figures."""

from __future__ import annotations

import pytest

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import (
    Action,
    in_flight,
    make_schedule,
    register_schedule,
)
from lightning_gpp.schedules.one_f_one_b import in_flight_samples
from tests.strategies import action_of, chain, plan_of


def rows(plan: Plan, batch_size: int | None = None, training: bool = True) -> list[str]:
    return str(make_schedule(plan, batch_size, training)).splitlines()


def test_gpipe_on_two_arms() -> None:
    plan = plan_of([(0, 2), (1, 2)], (1, 1, 1), 4, schedule="gpipe")
    assert rows(plan) == [
        "0: 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3",
        "1: 1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3",
        "2: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
    ]


def test_one_f_one_b_on_unequal_arms() -> None:
    plan = plan_of([(0, 1), (1, 3), (2, 3)], (1, 1, 1, 1), 4)
    assert rows(plan) == [
        "0: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3",
        "1: 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3",
        "2: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "3: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
    ]


def test_data_come_first_on_the_devices_of_the_step() -> None:
    plan = plan_of([(0, 1)], (2, 3), 6, devices=[(0, 1), (1, 0)], data=True)
    for row in rows(plan):
        assert row[3:].startswith("1D0 1D1 0F0 ")


def test_two_stages_on_one_device_prefer_the_backward() -> None:
    plan = plan_of([(0, 1)], (1, 1), 3, devices=[(0,), (0,)])
    assert rows(plan) == ["0: 0F0 1F0 1B0 0F1 0B0 1F1 1B1 0F2 0B1 1F2 1B2 0B2"]


@pytest.mark.parametrize(
    ("sizes", "samples"),
    [
        ((1, 2, 4), (10, 8, 4)),
        ((4, 4, 4), (12, 8, 4)),
        ((2, 2, 2), (6, 4, 2)),
        ((4, 2), (8, 2)),
        ((2, 1), (4, 1)),
        ((4, 1), (8, 1)),
        ((2, 4), (8, 4)),
        ((1, 4), (8, 4)),
        ((64,) * 6, (384, 320, 256, 192, 128, 64)),
    ],
)
def test_in_flight_samples_of_chains(sizes: tuple[int, ...], samples: tuple[int, ...]) -> None:
    """GraphPipe's figure 5 (10 in flight), and the in-flight samples of its authors' sequential CANDLE strategy."""
    assert tuple(in_flight_samples(chain(sizes, 1024)).values()) == samples


def test_sizes_that_stall_by_the_rule_get_a_longer_warm_up() -> None:
    """The rule looks at one edge at a time; in a diamond of sizes that do not divide each other that is too short."""
    plan = plan_of([(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)], (10, 9, 8, 1, 4), 93)
    ruled = {
        stage: samples // plan.stages[stage].micro_batch_size for stage, samples in in_flight_samples(plan).items()
    }
    assert ruled == {0: 3, 1: 2, 2: 2, 3: 8, 4: 1}
    assert in_flight(plan) == {0: 4, 1: 3, 2: 3, 3: 9, 4: 2}


def test_unknown_schedule() -> None:
    with pytest.raises(ScheduleError, match=r"strategy\.schedule='2f2b' is not a schedule.*1f1b, .*gpipe"):
        make_schedule(chain((1,), 1, schedule="2f2b"))


def test_no_samples() -> None:
    with pytest.raises(ScheduleError, match="at least 1 sample per pipeline replica, got batch_size=0"):
        make_schedule(chain((1,), 1), 0)


def _order(stage: int, text: str) -> tuple[Action, ...]:
    return tuple(action_of(f"{stage}{part}") for part in text.split())


def test_own_schedule() -> None:
    @register_schedule("test_backward_at_once")
    def backward_at_once(plan: Plan, batch_size: int) -> dict[int, tuple[Action, ...]]:
        return {0: _order(0, "F0 F1 B0 B1"), 1: _order(1, "F0 B0 F1 B1")}

    assert rows(chain((1, 1), 2, "test_backward_at_once")) == ["0: 1F0 1B0 1F1 1B1", "1: 0F0 0F1 0B0 0B1"]
    with pytest.raises(ScheduleError, match="'test_backward_at_once' is registered already"):
        register_schedule("test_backward_at_once")(backward_at_once)


def test_own_schedule_that_waits_in_a_circle() -> None:
    @register_schedule("test_circle")
    def circle(plan: Plan, batch_size: int) -> dict[int, tuple[Action, ...]]:
        return {0: _order(0, "F0 B0 F1 B1"), 1: _order(1, "F0 F1 B0 B1")}

    with pytest.raises(ScheduleError, match=r"'test_circle' \(strategy.schedule\) deadlock; .*device 0: 1F1"):
        make_schedule(chain((1, 1), 2, "test_circle"))


def test_own_schedule_that_forgets_a_micro_batch() -> None:
    @register_schedule("test_forgets")
    def forgets(plan: Plan, batch_size: int) -> dict[int, tuple[Action, ...]]:
        return {0: _order(0, "F0 B0")}

    with pytest.raises(ScheduleError, match="device 0: the order must contain the forward and the backward of each"):
        make_schedule(chain((1,), 2, "test_forgets"))
