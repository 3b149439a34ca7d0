"""Random plans for property tests, and builders of the plans that have a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from lightning_gpp.graph import Affine
from lightning_gpp.plan import SOURCE, STEP, Edge, Plan, Stage
from lightning_gpp.schedules import Action, Kind, Schedule
from tests.schedules.random_plans import Limits, any_plan


def action_of(text: str) -> Action:
    """`2F0`: stage 2, forward, micro-batch 0."""
    (stage, number), (kind,) = re.findall(r"\d+", text), re.findall("[A-Z]", text)
    return Action(int(stage), Kind(kind), int(number))


def schedule_of(text: str) -> Schedule:
    """One line per device, in order: `device: action action ...`."""
    lines = (line.partition(":") for line in text.splitlines() if line.strip())
    return Schedule(tuple(tuple(map(action_of, actions.split())) for _, _, actions in lines))


def plan_of(
    pairs: Sequence[tuple[int, int]],
    sizes: Sequence[int],
    batch_size: int,
    *,
    schedule: str = "1f1b",
    devices: Sequence[Sequence[int]] | None = None,
    data: bool = False,
    reads: Sequence[int] = (),
) -> Plan:
    """A plan with these edges and micro-batch sizes; each stage on its own device, the last stage on device 0.

    `data` adds SOURCE edges to the stages without predecessors, and to those of `reads`.
    """
    number = len(sizes)
    places = devices or [(number - 1 - stage,) for stage in range(number)]
    stages = tuple(
        Stage(
            name=f"stage{stage}",
            modules=(STEP,) if stage == number - 1 else (f"module{stage}",),
            devices=tuple(places[stage]),
            micro_batch_size=sizes[stage],
        )
        for stage in range(number)
    )
    edges = [Edge(src=src, dst=dst, bytes=Affine(4, 0)) for src, dst in pairs]
    roots = {stage for stage in range(number) if all(dst != stage for _, dst in pairs)} if data else set()
    read = sorted(roots | set(reads))
    sources = [Edge(src=SOURCE, dst=stage, bytes=Affine(4, 0), differentiable=False) for stage in read]
    return Plan(stages=stages, edges=(*sources, *edges), batch_size=batch_size, schedule=schedule)


def rerunning(plan: Plan, wanted: bool = True) -> Plan:
    """The plan with all stages but the last recomputed, or none."""
    last = plan.step_stage
    stages = (replace(stage, recompute=wanted and index != last) for index, stage in enumerate(plan.stages))
    return replace(plan, stages=tuple(stages))


def offloading(plan: Plan, wanted: bool = True) -> Plan:
    """The plan with all stages offloaded, or none."""
    return replace(plan, stages=tuple(replace(stage, offload=wanted) for stage in plan.stages))


def chain(sizes: Sequence[int], batch_size: int, schedule: str = "1f1b") -> Plan:
    return plan_of([(i, i + 1) for i in range(len(sizes) - 1)], sizes, batch_size, schedule=schedule)


def towers(num_towers: int, length: int, batch_size: int, size: int = 1, schedule: str = "1f1b") -> Plan:
    """Towers of `length` stages each that join in a head: depth `length + 1`."""
    head = num_towers * length
    pairs = []
    for tower in range(num_towers):
        stages = [*range(tower * length, (tower + 1) * length), head]
        pairs += list(zip(stages, stages[1:], strict=False))
    return plan_of(sorted(pairs), [size] * (head + 1), batch_size, schedule=schedule, data=True)


def plans(
    schedules: Sequence[str] = ("1f1b", "gpipe"), *, detached: bool = True, **limits: int
) -> st.SearchStrategy[Plan]:
    """Any plan: a DAG whose only sink runs the step, stages on shared devices, replicas, unequal micro-batch sizes,
    an uneven last micro-batch. `detached` allows edges through which no gradients flow."""
    known = Limits(**{"max_stages": 7, "max_devices": 5, "max_batch": 16, **limits})
    numbers, names = st.integers(0, 2**32), st.sampled_from(list(schedules))
    return st.builds(lambda number, name: any_plan(number, name, known, detached=detached), numbers, names)
