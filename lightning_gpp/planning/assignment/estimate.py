"""Costs of a plan's stages, from the captured operators, for the simulator and, in the plan, for schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_gpp.cluster import Cluster, Device
from lightning_gpp.cluster.groups import grouped
from lightning_gpp.costs.model import CostModel, Footprint, Seconds, held_copies, rerun_seconds
from lightning_gpp.costs.tensor_parallel import roofline_of
from lightning_gpp.graph import Affine, Operator, OperatorGraph
from lightning_gpp.plan import SOURCE, Edge, Figures, Plan, Stage
from lightning_gpp.planning.assignment.assign import assign
from lightning_gpp.planning.assignment.modules import operators_of, recomputed_blocks
from lightning_gpp.planning.assignment.slices import sliced_costs
from lightning_gpp.schedules.lowering import carries_gradient
from lightning_gpp.simulation.stage_costs import StageCosts
from lightning_gpp.slices import unsliced

SECONDS: Final = ("forward_seconds", "input_seconds", "weight_seconds")
"""The figures of a stage that are seconds."""


def timed(plan: Plan, costs: StageCosts, memory_bytes: Sequence[float] = ()) -> Plan:
    """The plan with the seconds of its actions and messages, and the memory that each device has left for activations.

    The figures travel with the plan, so that every rank makes the same schedule, wherever it was planned.

    Args:
        plan: the plan of one pipeline.
        costs: costs of its stages.
        memory_bytes: memory of each device; empty if there is no limit.
    """
    stages = tuple(_timed_stage(stage, index, costs) for index, stage in enumerate(plan.stages))
    edges = tuple(replace(edge, seconds=_edge_seconds(plan, edge, costs)) for edge in plan.edges)
    room = tuple(_room(plan, costs, device, limit) for device, limit in enumerate(memory_bytes))
    return replace(plan, stages=stages, edges=edges, memory_bytes=room)


def _timed_stage(stage: Stage, index: int, costs: StageCosts) -> Stage:
    """The stage with its seconds by a micro-batch's samples; the slowest replica's share counts."""
    cost = max((costs.replica(index, device) for device in stage.devices), key=lambda entry: _backward(entry, 1))
    share = 1 if stage.round_robin else len(stage.devices)
    costs_of_samples = ((name, getattr(cost, name)) for name in SECONDS)
    shared: dict[str, Any] = {name: Affine(each.per_sample / share, each.fixed) for name, each in costs_of_samples}
    return replace(stage, figures=replace(stage.figures, **shared))


def _backward(figures: Figures, num_samples: int) -> float:
    return figures.input_seconds.at(num_samples) + figures.weight_seconds.at(num_samples)


def _edge_seconds(plan: Plan, edge: Edge, costs: StageCosts) -> Affine:
    """Seconds of the transfer of a micro-batch between the first devices of both stages; 0 on the same device."""
    src, dst = plan.devices_of(edge.src)[0], plan.devices_of(edge.dst)[0]
    if src == dst or edge.artificial:
        return Affine()
    link = costs.cluster.link(src, dst) if costs.cluster else costs.default_link
    fixed = link.seconds(edge.bytes.fixed)
    return Affine(link.seconds(edge.bytes.at(1)) - fixed, fixed)


def _room(plan: Plan, costs: StageCosts, device: int, limit: float) -> float:
    """Bytes that the parameters of a device's stages and the mini-batch leave free; with fsdp, those of one stage are
    undivided.
    """
    stages = plan.stages_on(device)
    sizes = {stage: costs.replica(stage, device).parameter_bytes for stage in stages}
    ranks = {stage: costs.ranks[stage] if costs.ranks else len(plan.devices_of(stage)) for stage in stages}
    held = sum(size * held_copies(costs.parameter_copies, plan.sharding, ranks[stage]) for stage, size in sizes.items())
    undivided = 2 * max(sizes.values(), default=0.0) if plan.sharding == "fsdp" else 0.0
    return max(0.0, limit - costs.loaded_bytes(device) - held - undivided)


def with_figures_of(known: Plan, plan: Plan) -> Plan:
    """A plan for another form of the step, with the seconds, memory limits, sharding and members of the known one.

    Stages are matched by name, edges by the names of their ends; those without a match keep their own figures.
    """
    figures = {stage.name: stage.figures for stage in known.stages}
    seconds = {_ends(known, edge): edge.seconds for edge in known.edges}
    stages = tuple(replace(stage, figures=_merged(stage.figures, figures.get(stage.name))) for stage in plan.stages)
    edges = tuple(replace(edge, seconds=seconds.get(_ends(plan, edge), edge.seconds)) for edge in plan.edges)
    same = plan.num_devices == known.num_devices
    memory_bytes = known.memory_bytes if same else ()
    return replace(
        plan,
        stages=stages,
        edges=edges,
        memory_bytes=memory_bytes,
        sharding=known.sharding,
        tensor_parallel_size=known.tensor_parallel_size,
    )


def _merged(figures: Figures, known: Figures | None) -> Figures:
    if known is None:
        return figures
    return replace(figures, **{name: getattr(known, name) for name in SECONDS})


def _ends(plan: Plan, edge: Edge) -> tuple[str, str]:
    return "" if edge.src == SOURCE else plan.stages[edge.src].name, plan.stages[edge.dst].name


def estimate(
    graph: OperatorGraph,
    plan: Plan,
    cluster: Cluster,
    costs: CostModel | None = None,
    *,
    footprint: Footprint | None = None,
    num_pipelines: int = 1,
) -> StageCosts:
    """The costs of a plan's stages on a cluster.

    Seconds are exact, within the cost model, for a full share of a micro-batch and for 1 sample, and affine in between.
    The user's Python before the network costs nothing.

    Args:
        graph: the operator graph that the plan was made from.
        plan: the stages; device d of pipeline p is the cluster's device p x plan.num_devices + d; the slowest of these
            counts.
        cluster: devices and links. If a device of the plan has several members, these are devices of the cluster, one
            after the other, or it has groups of them (`cluster.groups`).
        costs: seconds of operators; by default the roofline model.
        footprint: what a device keeps per byte of parameters; float32 and Adam by default.
        num_pipelines: pipeline replicas, whose gradients are summed.
    """
    if plan.is_sliced:
        whole = unsliced(plan)
        costs_of_whole = estimate(graph, whole.plan, cluster, costs, footprint=footprint, num_pipelines=num_pipelines)
        return sliced_costs(costs_of_whole, plan, whole, graph)
    cluster, costs = grouped(cluster, plan.tensor_parallel_size), costs or roofline_of(graph)
    operators = operators_of(graph, assign(graph, [stage.modules for stage in plan.stages]), len(plan.stages))
    again = [_again(graph, *entry) for entry in zip(plan.stages, operators, strict=True)]
    kinds = {
        device: {cluster.kind(device + pipeline * plan.num_devices) for pipeline in range(num_pipelines)}
        for device in range(plan.num_devices)
    }
    heads = range(0, plan.num_devices * num_pipelines, plan.num_devices)
    holders = [[head + device for head in heads for device in stage.devices] for stage in plan.stages]
    by_kind = {
        (stage, kind): _stage_cost(operators[stage], again[stage], plan, stage, cluster.kinds[kind], costs)
        for stage in range(len(plan.stages))
        for kind in set().union(*(kinds[device] for device in plan.devices_of(stage)))
    }
    replicas = {
        (stage, device): _slowest([by_kind[stage, kind] for kind in sorted(kinds[device])], plan.stages[stage])
        for stage in range(len(plan.stages))
        for device in plan.devices_of(stage)
    }
    return StageCosts(
        stages=tuple(replicas[stage, plan.devices_of(stage)[0]] for stage in range(len(plan.stages))),
        replicas=replicas if not cluster.homogeneous else {},
        cluster=cluster,
        all_reduce=tuple(_all_reduce(plan, stage, cluster, copies) for stage, copies in enumerate(holders)),
        tied=_tied(plan, operators),
        ranks=tuple(len(stage.devices) * num_pipelines for stage in plan.stages),
        mini_batch_bytes=graph.input_bytes.at(plan.batch_size),
        parameter_copies=(footprint or Footprint()).copies,
    )


def _tied(plan: Plan, operators: Sequence[Sequence[Operator]]) -> tuple[tuple[int, ...], ...]:
    """Groups of stages that share parameters, and are on several devices."""
    users: dict[str, dict[int, None]] = {}
    for stage, listed in enumerate(operators):
        for name in (name for operator in listed for name in operator.parameters):
            users.setdefault(name, {})[stage] = None
    groups = dict.fromkeys(tuple(stages) for stages in users.values() if len(stages) > 1)
    return tuple(group for group in groups if len({plan.devices_of(stage) for stage in group}) > 1)


def _slowest(candidates: Sequence[Figures], stage: Stage) -> Figures:
    """The costs on the slowest pipeline's device, because pipelines wait for each other to reduce gradients."""
    share = -(-stage.micro_batch_size // len(stage.devices))
    return max(candidates, key=lambda cost: cost.forward_seconds.at(share) + _backward(cost, share))


def _all_reduce(plan: Plan, stage: int, cluster: Cluster, devices: Sequence[int]) -> float:
    return cluster.all_reduce_seconds(devices, plan.stages[stage].figures.parameter_bytes)


def _again(graph: OperatorGraph, stage: Stage, operators: Sequence[Operator]) -> list[list[Operator]]:
    """The operators of every module that runs again inside the stage's backward."""
    blocks = recomputed_blocks(graph, {operator.name for operator in operators}, stage.recomputed_blocks)
    return [[graph[name] for name in block.operators] for block in blocks]


def _stage_cost(
    operators: Sequence[Operator],
    again: Sequence[Sequence[Operator]],
    plan: Plan,
    index: int,
    kind: Device,
    costs: CostModel,
) -> Figures:
    """The figures of a stage with their seconds; gradients of weights of recomputed blocks are never computed apart."""
    stage = plan.stages[index]
    share = max(2, -(-stage.micro_batch_size // len(stage.devices)))
    inside = {operator.name for block in again for operator in block}
    points = {}
    for samples in (1, share):
        seconds = {operator.name: costs.seconds(operator, samples, kind) for operator in operators}
        points[samples] = [
            sum(s.forward for s in seconds.values()),
            sum(s.backward for s in seconds.values())
            + sum(rerun_seconds(costs, block, samples, kind) for block in again),
            _weight(plan, index, [s for name, s in seconds.items() if name not in inside]),
        ]
    forward, backward, weight = (_through({samples: point[i] for samples, point in points.items()}) for i in range(3))
    inputs = backward - weight
    return replace(stage.figures, forward_seconds=forward, input_seconds=inputs, weight_seconds=weight)


def _weight(plan: Plan, index: int, seconds: Sequence[Seconds]) -> float:
    """Seconds of the weight gradients; 0 for a stage that no other waits for: it computes all gradients at once."""
    waited_for = any(edge.dst == index and carries_gradient(edge) and not edge.artificial for edge in plan.edges)
    return sum(entry.weight_gradient for entry in seconds) if waited_for else 0.0


def _through(points: Mapping[int, float]) -> Affine:
    """The affine function through two points.

    The roofline is convex and grows no faster than its argument, so the function is never negative, nor below the
    roofline in between.
    """
    (first, low), (last, high) = sorted(points.items())
    slope = (high - low) / (last - first)
    return Affine(slope, low - slope * first)
