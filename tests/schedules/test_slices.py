"""1F1B over slices: the published order and what it holds in flight, and any graph whose stages are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Affine
from lightning_gpp.plan import STEP, Edge, Plan, Stage
from lightning_gpp.schedules import Schedule, compile_program, make_schedule, schedule_names
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.simulation import StageCosts, simulate
from lightning_gpp.slices import num_slices, unsliced


def sliced_chain(num_stages: int, slices: int, micro_batches: int, schedule: str = "1f1b") -> Plan:
    """A chain of stages, all of them cut, and the step on the last one's device."""
    return cut(
        [(i, i + 1) for i in range(num_stages)],
        [True] * num_stages + [False],
        [(num_stages - 1 - i,) for i in range(num_stages)] + [(0,)],
        slices,
        micro_batches,
        schedule,
    )


def cut(
    pairs: Sequence[tuple[int, int]],
    flags: Sequence[bool],
    devices: Sequence[tuple[int, ...]],
    slices: int,
    batch_size: int,
    schedule: str = "1f1b",
    size: int = 1,
) -> Plan:
    """The stages of a graph, those with a flag cut; the last one runs the step."""
    stages: list[Stage] = []
    numbers: list[list[int]] = []
    for index, flag in enumerate(flags):
        tokens = [(j, j + 1) for j in range(slices)] if flag else [None]
        numbers.append(list(range(len(stages), len(stages) + len(tokens))))
        stages += [
            Stage(
                name=f"s{index}" if part is None else f"s{index}[{part[0]}:{part[1]}]",
                modules=(STEP,) if index == len(flags) - 1 else (f"m{index}",),
                devices=devices[index],
                micro_batch_size=size,
                tokens=part,
            )
            for part in tokens
        ]
    edges = [Edge(src=a, dst=b, bytes=Affine(4)) for src, dst in pairs for a, b in _meet(numbers[src], numbers[dst])]
    edges += [Edge(src=a, dst=b, bytes=Affine(4)) for parts in numbers for a, b in zip(parts, parts[1:], strict=False)]
    return Plan(
        stages=tuple(stages),
        edges=tuple(sorted(edges, key=lambda e: (e.src, e.dst))),
        batch_size=batch_size,
        schedule=schedule,
    )


def _meet(above: list[int], below: list[int]) -> list[tuple[int, int]]:
    number = max(len(above), len(below))
    return [(above[i % len(above)], below[i % len(below)]) for i in range(number)]


def test_the_published_order() -> None:
    """Two stages, two slices: the table above the schedule."""
    schedule = make_schedule(sliced_chain(2, 2, 2))
    first = "0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1"
    last = [str(a) for a in schedule.devices[0] if a.stage in (2, 3)]
    assert " ".join(map(str, schedule.devices[1])) == first
    assert " ".join(last) == "2F0 3F0 3B0 2F1 2B0 3F1 3B1 2B1"


@pytest.mark.parametrize(("devices", "slices"), [(2, 2), (4, 2), (4, 4), (8, 4), (3, 8)])
def test_in_flight_are_the_slices_and_the_distance(devices: int, slices: int) -> None:
    """Seq1F1B holds n + distance slices, where 1F1B holds distance + 1 micro-batches of n slices."""
    program = compile_program(sliced_chain(devices, slices, 4 * devices))
    costs = StageCosts.uniform(program.plan)
    held = [costs.stages[0].activation_bytes.at(1) * count for count in _in_flight(program, costs)]
    assert held == [min(slices + distance, 4 * devices * slices) + (distance == 0) for distance in range(devices)]


def _in_flight(program, costs: StageCosts) -> list[float]:  # type: ignore[no-untyped-def]
    return [peak / costs.stages[0].activation_bytes.at(1) for peak in simulate(program, costs).peak_bytes]


@pytest.mark.parametrize(("devices", "slices", "micro_batches"), [(4, 4, 8), (8, 4, 8), (8, 8, 16)])
def test_the_bubble_shrinks(devices: int, slices: int, micro_batches: int) -> None:
    """A chain waits for its depth in slices instead of micro-batches: (p - 1) of m n + p - 1 slots, backwards split
    alike; the step takes no time."""
    plan = sliced_chain(devices, slices, micro_batches)
    cost = StageCosts.uniform(plan, 1, 2)
    free = replace(cost.stages[0], forward_seconds=Affine(), input_seconds=Affine(), activation_bytes=Affine())
    costs = StageCosts(stages=(*cost.stages[:-1], free))
    slots = micro_batches * slices
    assert simulate(compile_program(plan), costs).makespan == 3 * (slots + devices - 1)


def test_halves_of_backwards_in_slices() -> None:
    """ZB-H1 holds three slices on both stages, the last one of them for its second half only; ZB-H2 holds four."""
    schedule = make_schedule(sliced_chain(2, 2, 2, "zb_h1"))
    assert _of(schedule, 1, (0, 1)) == "0F0 1F0 0F1 1I0 1W0 1F1 0I0 0W0 1I1 1W1 0I1 0W1"
    assert _of(schedule, 0, (2, 3)) == "2F0 3F0 3I0 2F1 2I0 3W0 3F1 3I1 2W0 2I1 3W1 2W1"
    schedule = make_schedule(sliced_chain(2, 2, 2, "zb_h2"))
    assert _of(schedule, 1, (0, 1)) == "0F0 1F0 0F1 1F1 1I0 1W0 0I0 0W0 1I1 1W1 0I1 0W1"
    assert _of(schedule, 0, (2, 3)) == "2F0 3F0 3I0 2F1 2I0 3F1 3I1 3W0 2I1 2W0 3W1 2W1"


def _of(schedule: Schedule, device: int, stages: tuple[int, ...]) -> str:
    return " ".join(str(action) for action in schedule.devices[device] if action.stage in stages)


def test_slices_of_micro_batches_of_other_sizes() -> None:
    """Every slice of two samples waits for the same slice of two micro-batches, so four of them, eight slices, come
    before the first backward; with fewer than six, stages would wait for each other."""
    plan = sliced_chain(2, 2, 8)
    sizes = (1, 1, 2, 2, 2)
    stages = zip(plan.stages, sizes, strict=True)
    plan = replace(plan, stages=tuple(replace(stage, micro_batch_size=size) for stage, size in stages))
    schedule = make_schedule(plan)
    assert _of(schedule, 1, (0, 1)).startswith("0F0 1F0 0F1 1F1 0F2 1F2 0F3 1F3 1B0 0F4 0B0 1F4")
    assert _of(schedule, 0, (2, 3)).startswith("2F0 3F0 3B0 2F1 2B0 3F1 3B1 2F2")


@st.composite
def sliced_plans(draw: st.DrawFn) -> Plan:
    """Any graph with any of its stages cut; stages share devices, the step is alone."""
    number = draw(st.integers(2, 5))
    pairs = {(draw(st.integers(0, i - 1)), i) for i in range(1, number)}
    pairs |= {(i, number - 1) for i in range(number - 1) if all(src != i for src, _ in pairs)}
    flags = [draw(st.booleans()) for _ in range(number - 1)] + [False]
    places = draw(st.integers(1, 3))
    devices = [(draw(st.integers(0, places - 1)),) for _ in range(number - 1)] + [(0,)]
    used = sorted({d for (d,) in devices})
    devices = [(used.index(d),) for (d,) in devices]
    size = draw(st.integers(1, 2))
    return cut(sorted(pairs), flags, devices, draw(st.integers(2, 4)), draw(st.integers(1, 7)), size=size)


NAMES = [name for name in schedule_names() if not method_of(name).bidirectional]


@settings(max_examples=60, deadline=None)
@given(plan=sliced_plans())
def test_slices_put_together(plan: Plan) -> None:
    whole = unsliced(plan)
    assert not whole.plan.is_sliced
    assert num_slices(plan) == max(len(whole.parts(stage)) for stage in range(len(whole.plan.stages)))
    assert sorted(part for stage in range(len(whole.plan.stages)) for part in whole.parts(stage)) == list(
        range(len(plan.stages))
    )
    assert unsliced(whole.plan).plan == whole.plan


@pytest.mark.parametrize("tokens", [(1, 2), (0, 0), (0, 1)])
def test_slices_that_do_not_follow_each_other(tokens: tuple[int, int]) -> None:
    plan = sliced_chain(2, 2, 2)
    stages = list(plan.stages)
    stages[1] = replace(stages[1], tokens=tokens)
    if tokens == (1, 2):
        stages[1] = replace(stages[1], micro_batch_size=2)
    with pytest.raises(PlanError, match=r"Stage 's0\[1:2\]' is to compute tokens .*must follow each other from"):
        replace(plan, stages=tuple(stages))


def test_slices_of_other_tokens() -> None:
    plan = sliced_chain(2, 2, 2)
    stages = list(plan.stages)
    stages[2:4] = [replace(stages[2], tokens=(0, 3)), replace(stages[3], tokens=(3, 4))]
    with pytest.raises(PlanError, match="must be cut at the same tokens"):
        replace(plan, stages=tuple(stages))
    crossed = tuple(replace(edge, dst=3) if (edge.src, edge.dst) == (0, 2) else edge for edge in plan.edges)
    with pytest.raises(PlanError, match="Edge 0 -> 3 joins slices of different tokens"):
        replace(plan, edges=crossed)
