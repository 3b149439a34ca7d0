"""Pipelines in both directions: published figures, lower bounds, and any plan at all."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Action, Kind, Schedule, compile_program, lower, make_schedule
from lightning_gpp.simulation import StageCosts, simulate
from tests.schedules.mirrored import (
    bubble,
    mirrored_chain,
    peaks,
    played,
    round_robin,
    with_room,
    with_seconds,
)
from tests.strategies import towers

NAMES = ("chimera", "bitpipe")


def test_chimera_on_four_devices() -> None:
    assert str(make_schedule(mirrored_chain(4, 4))).splitlines() == [
        "0: 0F0 0F2 3F1 3B1 3F3 3B3 0B0 0B2",
        "1: 1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2",
        "2: 1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3",
        "3: 0F1 0F3 3F0 3B0 3F2 3B2 0B1 0B3",
    ]


def test_bitpipe_on_two_devices() -> None:
    assert str(make_schedule(mirrored_chain(2, 2, "bitpipe"))).splitlines() == [
        "0: 0F0 1F1 2F1 3F0 3B0 2B1 1B1 0B0",
        "1: 0F1 1F0 2F0 3F1 3B1 2B0 1B0 0B1",
    ]


@pytest.mark.parametrize("devices", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_chimera_with_equal_slots(devices: int, units: int) -> None:
    """The published ratio (D - 2) / (2N + D - 2)."""
    number = devices * units
    timeline = played(with_seconds(mirrored_chain(devices, number), 1, 1), 1, 1)
    assert bubble(timeline) == devices - 2
    assert timeline.bubble_fraction == pytest.approx((devices - 2) / (2 * number + devices - 2))
    assert max(peaks(timeline)) <= devices


@pytest.mark.parametrize("devices", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_chimera_with_backwards_of_twice_a_forward(devices: int, units: int) -> None:
    """Bubble 2 (D - 2), in the published room, however many micro-batches.

    For N = D none is smaller. A device in the middle starts D/2 - 1 late, and has N forwards before its first backward
    can come, at D + 2 (D/2 - 1); after its last backward D/2 - 1 others follow.
    """
    timeline = played(mirrored_chain(devices, devices * units))
    assert bubble(timeline) == 2 * (devices - 2)
    assert devices // 2 + 1 <= min(peaks(timeline)) <= max(peaks(timeline)) <= devices
    first_backward, last_backwards = devices + 2 * (devices // 2 - 1), 2 * (devices // 2 - 1)
    if units == 1:
        assert timeline.makespan == first_backward + 2 * devices + last_backwards


@pytest.mark.parametrize("devices", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("units", [2, 4])
def test_chimera_with_room_has_the_published_ratio_again(devices: int, units: int) -> None:
    """The least bubble of any order: devices in the middle start D/2 - 1 forwards late and end as many backwards early.

    It takes 3D/2 - 1 micro-batches in flight, and 3 where D is 2.
    """
    number = devices * units
    timeline = played(with_room(mirrored_chain(devices, number), 2 * devices))
    assert bubble(timeline) == 3 * (devices // 2 - 1)
    assert timeline.bubble_fraction == pytest.approx((devices - 2) / (2 * number + devices - 2))
    assert max(peaks(timeline)) <= max(3, 3 * devices // 2 - 1)


def published(devices: int, units: int) -> tuple[Plan, Schedule]:
    """Chimera as it is published: in both directions D/2 micro-batches, every second slot of equal length, which fit
    into each other; for more micro-batches again every 2D slots."""
    rows: dict[int, dict[int, Action]] = {device: {} for device in range(devices)}
    for stage, number, unit in product(range(devices), range(devices // 2), range(units)):
        for pipeline, device in enumerate((stage, devices - 1 - stage)):
            index, start = unit * devices + 2 * number + pipeline, 2 * (devices * unit + number)
            for kind, slot in ((Kind.FORWARD, stage), (Kind.BACKWARD, 2 * devices - 1 - stage)):
                assert start + slot not in rows[device]
                rows[device][start + slot] = Action(stage, kind, index)
    order = Schedule(tuple(tuple(row[slot] for slot in sorted(row)) for row in rows.values()))
    return mirrored_chain(devices, devices * units), order


@pytest.mark.parametrize(("devices", "units"), [(4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4)])
def test_chimera_is_no_slower_than_published(devices: int, units: int) -> None:
    """The same with equal slots, and for N = D; with backwards of twice a forward every further unit adds D - 2 to the
    published order, and nothing to this one."""
    plan, order = published(devices, units)
    program = lower(plan, order)
    assert bubble(simulate(program, StageCosts.uniform(plan, 1, 1))) == devices - 2
    assert bubble(simulate(program, StageCosts.uniform(plan, 1, 2))) == (units + 1) * (devices - 2)
    assert bubble(played(plan)) == 2 * (devices - 2)


@pytest.mark.parametrize(
    ("devices", "number", "published", "ours"),
    [(4, 4, 1 / 6, 1 / 6), (8, 8, 1 / 4, 1 / 4), (4, 16, 0.1042, 4 / 96), (8, 32, 0.1563, 13 / 192)],
)
def test_bitpipe(devices: int, number: int, published: float, ours: float) -> None:
    """Overhead in the room of the published order; 1F1B has (p - 1) / N."""
    timeline = played(mirrored_chain(devices, number, "bitpipe"))
    overhead = bubble(timeline) / max(timeline.busy)
    assert overhead == pytest.approx(ours)
    assert overhead <= published + 1e-9
    assert max(peaks(timeline)) <= 2 * devices


@pytest.mark.parametrize("num_bytes", [4, 5, 6, 8])
def test_memory_is_kept_to(num_bytes: int) -> None:
    plan = with_room(mirrored_chain(4, 16), num_bytes)
    costs = replace(StageCosts.uniform(plan, 1, 2), parameter_copies=0)
    assert max(simulate(compile_program(plan), costs).peak_bytes) <= num_bytes


@pytest.mark.parametrize("schedule", NAMES)
def test_towers_take_no_longer_than_their_depth(schedule: str) -> None:
    """Two towers and a head, on five devices and back, as fast as a chain of the same depth on as many devices."""
    plan = towers(2, 2, 8, schedule=schedule)
    plan = round_robin(plan, [(4, 0), (3, 1), (1, 3), (0, 4), (2,)])
    assert plan.depth == 3
    assert played(plan).makespan < played(plan.chained()).makespan
