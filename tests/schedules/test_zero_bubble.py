"""Zero bubble: the bubble rates of its paper, its memory, and its heuristic on graphs of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.graph import Affine
from lightning_gpp.plan import Figures, Plan
from lightning_gpp.schedules import Kind, compile_program, make_schedule
from lightning_gpp.simulation import Link, StageCosts, Timeline, simulate
from tests.strategies import chain, plan_of

Times = tuple[float, float, float, float]
"""Milliseconds of F, I (the paper's B), W, and of a message."""

SEQUENCE = 1024


def profiled(schedule: str, stages: int, number: int, times: Times, room: int, model: tuple[int, int]) -> Plan:
    """A chain of equal stages with room for `room` times as many micro-batches on each device as there are stages."""
    forward, inputs, weight, message = map(Affine, times)
    kept, pending = bytes_of(model)
    plan = chain((1,) * stages, number, schedule)
    figures = Figures(
        activation_bytes=Affine(kept),
        pending_bytes=Affine(pending),
        forward_seconds=forward,
        input_seconds=inputs,
        weight_seconds=weight,
    )
    return replace(
        plan,
        stages=tuple(replace(stage, figures=figures) for stage in plan.stages),
        edges=tuple(replace(edge, seconds=message) for edge in plan.edges),
        memory_bytes=(room * stages * kept,) * stages,
    )


def bytes_of(model: tuple[int, int]) -> tuple[int, int]:
    """What a micro-batch keeps of a transformer layer until I, and from there to W; of one sample and token."""
    heads, width = model
    return 34 * width + 5 * heads * SEQUENCE, 32 * width


def played(plan: Plan) -> Timeline:
    """Simulated with the plan's own figures."""
    stages = tuple(stage.figures for stage in plan.stages)
    latency = max((edge.seconds.at(1) for edge in plan.edges), default=0)
    return simulate(compile_program(plan), StageCosts(stages=stages, default_link=Link(latency=latency)))


def longest(timeline: Timeline) -> float:
    """From the first start to the last stop of the device that takes longest: what the paper calls cost."""
    return max(spans[-1].stop - spans[0].start for spans in timeline.devices)


def bubble_rate(timeline: Timeline) -> float:
    return 1 - max(timeline.busy) / longest(timeline)


# Stages, micro-batches, milliseconds, heads and width of the model; rates of 1F1B, ZB-1p and ZB-2p as published (tables
# 6 and 9 of the paper, recomputed with the authors' code); rate of ZB-2p here, which is never worse.
PROFILES = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (24, 2304), 0.2431, 0.1585, 0.0433, 0.0433),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (24, 2304), 0.1985, 0.1242, 0.0039, 0.0017),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (24, 2304), 0.1240, 0.0674, 0.0026, 0.0011),
    (8, 24, (29.718, 29.444, 19.927, 0.527), (32, 4096), 0.2347, 0.1323, 0.0029, 0.0012),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (40, 5120), 0.2552, 0.1397, 0.0066, 0.0040),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (48, 6144), 0.2646, 0.1421, 0.0038, 0.0035),
    (4, 12, (1, 1, 1, 0), (24, 2304), 0.2, 0.0769, 0, 0),
    (8, 24, (1, 1, 1, 0), (24, 2304), 0.2258, 0.0886, 0, 0),
    (8, 64, (1, 1, 1, 0), (24, 2304), 0.0986, 0.0352, 0, 0),
    (16, 64, (1, 1, 1, 0), (24, 2304), 0.1899, 0.0725, 0, 0),
]


@pytest.mark.parametrize(
    ("stages", "number", "times", "model", "one", "zb_1p", "zb_2p", "here"),
    [pytest.param(*row, marks=pytest.mark.acceptance if row[0] > 8 else ()) for row in PROFILES],
)
def test_published_bubble_rates(
    stages: int,
    number: int,
    times: Times,
    model: tuple[int, int],
    one: float,
    zb_1p: float,
    zb_2p: float,
    here: float,
) -> None:
    def timeline(schedule: str, room: int) -> Timeline:
        return played(profiled(schedule, stages, number, times, room, model))

    kept, _ = bytes_of(model)
    assert round(bubble_rate(timeline("1f1b", 1)), 4) == one
    narrow, wide = timeline("zero_bubble", 1), timeline("zero_bubble", 2)
    assert round(bubble_rate(narrow), 4) == zb_1p
    assert max(narrow.peak_bytes) == stages * kept
    assert round(bubble_rate(wide), 4) == here <= zb_2p
    assert max(wide.peak_bytes) <= 2 * stages * kept


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize(
    ("forward", "inputs", "weight"), [(1, 1, 1), (2, 2, 1), (3, 2, 1), (2, 3, 2), (1, 2, 1), (3, 3, 1.5)]
)
def test_hand_schedules_take_their_closed_forms(stages: int, forward: float, inputs: float, weight: float) -> None:
    """(p - 1)(T_F + T_I - T_W) in p micro-batches' memory, (p - 1)(T_F + T_I - 2 T_W) in 2p - 1 micro-batches'."""
    number, (kept, pending) = 3 * stages, bytes_of((24, 2304))
    for name, lead in (("zb_h1", 1), ("zb_h2", 2)):
        plan = profiled(name, stages, number, (forward, inputs, weight, 0), 1, (24, 2304))
        timeline = played(plan)
        waits = (stages - 1) * (forward + inputs - lead * weight)
        assert longest(timeline) == pytest.approx(number * (forward + inputs + weight) + waits)
        whole = [1 + lead * (depth - 1) for depth in range(1, stages + 1)]
        assert timeline.peak_bytes[-1] == max(timeline.peak_bytes) == whole[-1] * kept
        for device, peak in enumerate(timeline.peak_bytes):
            assert peak == whole[device] * kept + (whole[-1] - whole[device]) * pending


def rows(plan: Plan) -> list[str]:
    return str(make_schedule(plan)).splitlines()


def test_zb_h1_literally() -> None:
    assert rows(chain((1, 1, 1), 5, "zb_h1")) == [
        "0: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2F4 2I4 2W2 2W3 2W4",
        "1: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1I4 1W3 1W4",
        "2: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0I3 0W3 0I4 0W4",
    ]


def test_zero_bubble_on_unequal_arms() -> None:
    plan = plan_of([(0, 1), (1, 3), (2, 3)], (1, 1, 1, 1), 4, schedule="zero_bubble")
    assert rows(plan) == [
        "0: 3F0 3I0 3F1 3I1 3F2 3I2 3W0 3F3 3I3 3W1 3W2 3W3",
        "1: 2F0 2F1 2I0 2F2 2I1 2W0 2F3 2I2 2W1 2I3 2W2 2W3",
        "2: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "3: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
    ]


def test_layerpipe_levels_loads() -> None:
    """A stage that takes twice as long leaves its W to the end; those beside it do theirs in between."""
    plan = profiled("layerpipe", 3, 6, (1, 1, 1, 0), 4, (24, 2304))
    slow = replace(plan.stages[2].figures, forward_seconds=Affine(2), input_seconds=Affine(2), weight_seconds=Affine(2))
    plan = replace(plan, stages=(*plan.stages[:2], replace(plan.stages[2], figures=slow)))
    actions = [[span.action for span in spans] for spans in played(plan).devices]
    after_last_input = [
        sum(action.kind is Kind.WEIGHT for action in row[max(i for i, a in enumerate(row) if a.kind is Kind.INPUT) :])
        for row in actions
    ]
    assert after_last_input == [6, 1, 1]
    assert longest(played(plan)) == 6 * 6
    assert longest(played(replace(plan, schedule="1f1b"))) > 6 * 6


def test_seconds_of_messages_count() -> None:
    """Room for the deepest stage's 1F1B only; slow messages need a longer warm-up below it, and get it."""
    near = profiled("zero_bubble", 4, 12, (1, 1, 1, 0), 2, (24, 2304))
    far = replace(near, edges=tuple(replace(edge, seconds=Affine(0, 1.5)) for edge in near.edges))
    assert make_schedule(near) != make_schedule(far)
    latency = {"default_link": Link(latency=1.5)}
    costs = replace(StageCosts.uniform(near, 1, 2, 1), **latency)
    blind, aware = (longest(simulate(compile_program(plan), costs)) for plan in (near, far))
    assert aware < blind


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_hand_schedules_split_no_backward_that_has_one_half(name: str) -> None:
    """The user's step alone beside another stage; a stage whose gradients of parameters take no time. All else is as it
    was with both halves."""
    plan = profiled(name, 3, 4, (1, 1, 1, 0), 1, (24, 2304))
    frozen = replace(plan.stages[0].figures, weight_seconds=Affine(), pending_bytes=Affine())
    known = replace(plan, stages=(replace(plan.stages[0], figures=frozen), *plan.stages[1:]))
    extra = plan_of([(0, 1), (1, 2)], (1, 1, 1), 4, schedule=name, devices=[(1,), (0,), (0,)])
    for each, stage in ((known, 0), (extra, 2)):
        actions = [action for row in make_schedule(each).devices for action in row]
        kinds = {index: {action.kind for action in actions if action.stage == index} for index in range(3)}
        split = {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT}
        assert kinds == {index: {Kind.FORWARD, Kind.BACKWARD} if index == stage else split for index in range(3)}
    both = [row.replace("0B", "0I") for row in rows(known)]
    assert both == [" ".join(part for part in row.split() if part[:2] != "0W") for row in rows(plan)]
