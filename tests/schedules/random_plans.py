"""Random plans by number: any graph of stages on any devices, for any schedule. Equal numbers give equal plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import Affine
from lightning_gpp.plan import SHARDINGS, SOURCE, STEP, Edge, Figures, Plan, Stage
from lightning_gpp.planning.assignment.layout import laid_out
from lightning_gpp.schedules import schedule_names
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.simulation import Link, StageCosts
from tests.schedules.random_slices import in_slices

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of random plans.

    `uncut`: edges with tensors that cannot be cut, which most plans do not support. `sliced`: fraction of the plans
    with sliced stages.
    """

    max_stages: int = 9
    max_devices: int = 6
    max_replicas: int = 3
    max_copies: int = 3
    max_batch: int = 24
    max_size: int = 5
    uncut: bool = True
    sliced: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan and the other arguments of a program.

    `batch_size` of one pipeline replica may differ from the plan's. `reduce`: an optimizer step follows.
    """

    number: int
    plan: Plan
    costs: StageCosts
    batch_size: int
    copies: int
    training: bool
    reduce: bool

    def __str__(self) -> str:
        plan = self.plan
        stages = "\n".join(
            f"  {i}: {' '.join(stage.modules)}{stage.tokens or ''} on {stage.devices}, size {stage.micro_batch_size}"
            f"{', in turn' * stage.round_robin}{', recomputed' * stage.recompute}"
            f"{', offloaded' * stage.offload}, {stage.figures}"
            for i, stage in enumerate(plan.stages)
        )
        edges = "\n".join(f"  {edge}" for edge in plan.edges)
        return (
            f"case {self.number}: {plan.schedule}, batch of {self.batch_size}, {self.copies} copies, "
            f"training={self.training}, reduce={self.reduce}, sharding={plan.sharding}, "
            f"memory_bytes={plan.memory_bytes}\n{stages}\n{edges}"
        )


def case_of(number: int, limits: Limits | None = None) -> Case:
    """The case with this number; the schedules take turns."""
    limits = limits or Limits()
    draw = random.Random(number)
    names = schedule_names()
    plan = _with_extras(draw, _placed(draw, _bare(draw, names[number % len(names)], limits), limits), limits)
    other_draw = random.Random(f"slices of {number}")
    if other_draw.random() < limits.sliced:
        plan = in_slices(other_draw, plan)
    else:
        plan = _offloading(random.Random(f"offload of {number}"), plan)
    other = draw.random() < 0.2
    return Case(
        number=number,
        plan=plan,
        costs=_costs(draw, plan),
        batch_size=draw.randint(1, limits.max_batch) if other else plan.batch_size,
        copies=draw.randint(1, limits.max_copies),
        training=draw.random() < 0.9,
        reduce=draw.random() < 0.9,
    )


def any_plan(number: int, schedule: str, limits: Limits, *, detached: bool = True) -> Plan:
    """The plan with this number: stages anywhere, whose replicas share micro-batches, without figures."""
    draw = random.Random(number)
    plan = _anywhere(draw, _bare(draw, schedule, limits), limits)
    stages = tuple(replace(stage, round_robin=False) for stage in plan.stages)
    edges = _edges(draw, plan, timed=False, cut=True)
    flowing = (edge if detached or edge.src == SOURCE else replace(edge, differentiable=True) for edge in edges)
    return replace(plan, stages=stages, edges=tuple(flowing))


def _bare(draw: random.Random, schedule: str, limits: Limits) -> Plan:
    """A graph of stages, all on device 0."""
    number = draw.randint(1, limits.max_stages)
    pairs = draw.choice(GRAPHS)(draw, number)
    number = 1 + max((dst for _, dst in pairs), default=number - 1)
    same = draw.randint(1, limits.max_size)
    equal = draw.random() < 0.5
    stages = tuple(
        Stage(
            name=f"stage{i}",
            modules=_modules(i, i == number - 1, draw.random() < 0.3),
            devices=(0,),
            micro_batch_size=same if equal else draw.randint(1, limits.max_size),
        )
        for i in range(number)
    )
    edges = tuple(Edge(src=src, dst=dst, bytes=Affine(8, 0)) for src, dst in pairs)
    return Plan(stages=stages, edges=edges, batch_size=draw.randint(1, limits.max_batch), schedule=schedule)


def _modules(index: int, last: bool, step_alone: bool) -> tuple[str, ...]:
    if not last:
        return (f"module{index}",)
    return (STEP,) if step_alone else (f"module{index}", STEP)


def _any_graph(draw: random.Random, number: int) -> Pairs:
    """Every stage but the last has one to three successors."""
    pairs: set[tuple[int, int]] = set()
    for stage in range(number - 1):
        pairs |= {(stage, draw.randint(stage + 1, number - 1)) for _ in range(draw.randint(1, 3))}
    return sorted(pairs)


def _chain(draw: random.Random, number: int) -> Pairs:
    return [(i, i + 1) for i in range(number - 1)]


def _skips(draw: random.Random, number: int) -> Pairs:
    """A chain with skips: stages of the first half also feed the mirrored stages of the second."""
    return sorted({*_chain(draw, number), *((i, number - 1 - i) for i in range(number // 2))})


def _towers(draw: random.Random, number: int) -> Pairs:
    """Two to four chains of different lengths that join in a head."""
    towers: list[list[int]] = [[] for _ in range(draw.randint(2, 4))]
    for stage in range(number - 1):
        draw.choice(towers).append(stage)
    pairs = [pair for tower in towers for pair in pairwise([*tower, number - 1])]
    return sorted(pairs)


def _encoder_decoder(draw: random.Random, number: int) -> Pairs:
    """The last stage of the encoder feeds every stage of the decoder."""
    encoder = draw.randint(0, number - 1)
    return sorted({*_chain(draw, number), *((encoder, i) for i in range(encoder + 1, number))})


GRAPHS: Final[Sequence[Callable[[random.Random, int], Pairs]]] = (
    _any_graph,
    _chain,
    _skips,
    _towers,
    _encoder_decoder,
)


def _placed(draw: random.Random, plan: Plan, limits: Limits) -> Plan:
    """Stages laid out over devices as the schedule requires or the other way, in both directions, or anywhere."""
    method = method_of(plan.schedule)
    placement = method.layout if draw.random() < 0.7 else draw.choice(("looped", "zigzag"))
    kind = draw.random()
    if kind < 0.4:
        return _anywhere(draw, plan, limits)
    most = min(limits.max_devices, len(plan.stages))
    fitting = max(1, len(plan.stages) // method.stages_per_device)
    try:
        folded = laid_out(plan, min(most, fitting) if draw.random() < 0.6 else draw.randint(1, most), placement)
    except ConfigError:  # the step's stage is left out of the line
        return plan
    return _both_ways(folded) if method.bidirectional or kind > 0.9 else folded


def _both_ways(plan: Plan) -> Plan:
    """A second replica of every stage on the mirrored device, except for a stage with the step alone."""
    last = plan.num_devices - 1

    def mirrored(stage: Stage) -> Stage:
        (device,) = stage.devices
        alone = 2 * device == last or stage.modules == (STEP,)
        return stage if alone else replace(stage, devices=(device, last - device), round_robin=True)

    return replace(plan, stages=tuple(map(mirrored, plan.stages)))


def _anywhere(draw: random.Random, plan: Plan, limits: Limits) -> Plan:
    """One to three devices for each stage, numbered from the sink on; replicas share micro-batches or take turns."""
    numbers: dict[int, int] = {}
    stages = list(plan.stages)
    most = draw.randint(1, limits.max_devices)
    for index in reversed(range(len(stages))):
        count = min(most, limits.max_replicas, draw.choice((1, 1, 1, 2, limits.max_replicas)))
        places = [numbers.setdefault(device, len(numbers)) for device in draw.sample(range(most), count)]
        turns = count > 1 and draw.random() < 0.4
        stages[index] = replace(stages[index], devices=tuple(places), round_robin=turns)
    return replace(plan, stages=tuple(stages))


def _with_extras(draw: random.Random, plan: Plan, limits: Limits) -> Plan:
    """Data, costs, recomputation, sharding, memory, edges of every kind; sometimes as a chain."""
    known, again = draw.choice((0.0, 0.0, 0.7, 1.0, 1.0)), draw.choice((0.0, 0.0, 0.5, 1.0))
    stages = tuple(
        replace(
            stage,
            figures=_figures(draw) if draw.random() < known else Figures(),
            recompute=STEP not in stage.modules and draw.random() < again,
        )
        for stage in plan.stages
    )
    timed, cut = draw.random() < 0.4, draw.random() > 0.02 or not limits.uncut
    plan = replace(plan, stages=stages, edges=tuple(_edges(draw, plan, timed, cut)))
    plan = replace(plan, sharding=draw.choice(SHARDINGS), memory_bytes=_memory(draw, plan))
    return plan.chained() if draw.random() < 0.1 else plan


def _offloading(draw: random.Random, plan: Plan) -> Plan:
    """The plan with some of the stages offloaded that are not recomputed."""
    share = draw.choice((0.0, 0.0, 0.5, 1.0))
    chosen = [not stage.reruns and draw.random() < share for stage in plan.stages]
    return replace(
        plan, stages=tuple(replace(stage, offload=moved) for stage, moved in zip(plan.stages, chosen, strict=True))
    )


def _figures(draw: random.Random) -> Figures:
    kept = draw.uniform(0, 10)
    forward, inputs, weight = (Affine(draw.uniform(0, 2), draw.uniform(0, 0.5)) for _ in range(3))
    return Figures(
        flops=Affine(1, 0),
        activation_bytes=Affine(kept, 0),
        pending_bytes=Affine(draw.uniform(0, kept), 0),
        forward_seconds=forward,
        input_seconds=inputs,
        weight_seconds=draw.choice((weight, weight, Affine())),
        num_parameters=1,
        parameter_bytes=draw.randint(0, 20),
    )


def _edges(draw: random.Random, plan: Plan, timed: bool, cut: bool) -> list[Edge]:
    """The plan's edges, a few without gradients, and data for stages without predecessors and some others."""
    fed = {edge.dst for edge in plan.edges}
    read = {stage for stage in range(len(plan.stages)) if stage not in fed or draw.random() < 0.1}
    data = [Edge(src=SOURCE, dst=stage, bytes=Affine(4, 0), differentiable=False) for stage in sorted(read)]
    edges = []
    for edge in plan.edges:
        seconds = Affine(draw.uniform(0, 0.3), draw.uniform(0, 1)) if timed else Affine()
        flows, sliceable = draw.random() > 0.1, cut or draw.random() < 0.5
        edges.append(replace(edge, differentiable=flows, sliceable=sliceable, seconds=seconds))
    return [*data, *edges] if draw.random() < 0.9 else edges


def _memory(draw: random.Random, plan: Plan) -> tuple[float, ...]:
    """Memory limits: none, or between less than one micro-batch of each stage and more than all."""
    if draw.random() < 0.6:
        return ()
    most = max(plan.batch_size * stage.figures.activation_bytes.per_sample for stage in plan.stages)
    return tuple(draw.choice((0.1, 0.5, 1.0, 5.0)) * (most or 4.0) for _ in range(plan.num_devices))


def _costs(draw: random.Random, plan: Plan) -> StageCosts:
    """The plan's costs, if it has any, or others."""
    told = draw.random() < 0.5
    link = draw.choice((Link(), Link(latency=draw.uniform(0, 3), bytes_per_second=draw.uniform(1, 100))))
    summed = draw.random() < 0.5
    return StageCosts(
        stages=tuple(_cost(stage.figures if told else _figures(draw)) for stage in plan.stages),
        default_link=link,
        all_reduce=tuple(draw.uniform(0, 3) for _ in plan.stages) if summed else (),
        data=draw.choice((Affine(), Affine(0.1, 0.1))),
    )


def _cost(figures: Figures) -> Figures:
    if figures.flops.per_sample:
        return figures
    return Figures(forward_seconds=Affine(1, 0), input_seconds=Affine(1, 0), weight_seconds=Affine(1, 0))
