"""Plans of pipelines in two directions, and what tests read off their timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from lightning_gpp.graph import Affine
from lightning_gpp.plan import SOURCE, STEP, Edge, Figures, Plan, Stage
from lightning_gpp.schedules import Kind, compile_program
from lightning_gpp.simulation import StageCosts, Timeline, simulate
from tests.strategies import plan_of


def round_robin(plan: Plan, devices: Sequence[Sequence[int]]) -> Plan:
    """The plan with its stages on these devices; several of a stage take micro-batches in turn."""
    stages = tuple(
        replace(stage, devices=tuple(places), round_robin=len(places) > 1)
        for stage, places in zip(plan.stages, devices, strict=True)
    )
    return replace(plan, stages=stages)


def mirrored_chain(num_devices: int, num_micro_batches: int, schedule: str = "chimera") -> Plan:
    """A chain from device 0 on, forth and back for `bitpipe`, and the mirrored chain."""
    number = num_devices * (2 if schedule == "bitpipe" else 1)
    forth = [min(stage, number - 1 - stage) if number > num_devices else stage for stage in range(number)]
    chain = plan_of([(i, i + 1) for i in range(number - 1)], [1] * number, num_micro_batches, schedule=schedule)
    return round_robin(chain, [(place, num_devices - 1 - place) for place in forth])


def step_alone(plan: Plan) -> Plan:
    """The plan with the user's step in a stage of its own, on device 0 alone, which also has the data."""
    sink = len(plan.stages)
    stages = tuple(replace(stage, modules=(f"module{i}",)) for i, stage in enumerate(plan.stages))
    step = Stage(name="step", modules=(STEP,), devices=(0,), micro_batch_size=1)
    data = Edge(src=SOURCE, dst=0, bytes=Affine(4, 0), differentiable=False)
    edges = (data, *plan.edges, Edge(src=sink - 1, dst=sink, bytes=Affine(8, 0)))
    return replace(plan, stages=(*stages, step), edges=edges)


def with_room(plan: Plan, num_micro_batches: float) -> Plan:
    """A micro-batch keeps a byte on each stage, and each device has room for so many."""
    figures = Figures(activation_bytes=Affine(1, 0))
    stages = tuple(replace(stage, figures=figures) for stage in plan.stages)
    return replace(plan, stages=stages, memory_bytes=(float(num_micro_batches),) * plan.num_devices)


def with_seconds(plan: Plan, forward: float, backward: float) -> Plan:
    half = Affine(backward / 2, 0)
    figures = Figures(forward_seconds=Affine(forward, 0), input_seconds=half, weight_seconds=half)
    return replace(plan, stages=tuple(replace(stage, figures=figures) for stage in plan.stages))


def played(plan: Plan, forward: float = 1, backward: float = 2) -> Timeline:
    return simulate(compile_program(plan), StageCosts.uniform(plan, forward, backward))


def bubble(timeline: Timeline) -> float:
    """Time in which the busiest device waits."""
    return timeline.makespan - max(timeline.busy)


def peaks(timeline: Timeline) -> list[int]:
    """For every device the most micro-batches in flight, of all its stages together."""
    steps = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
    return [max(accumulate(steps.get(span.action.kind, 0) for span in spans)) for spans in timeline.devices]
