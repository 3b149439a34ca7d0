"""Costs of a plan's stages from the captured operators, for the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_gpp.cluster import Cluster, Device
from lightning_gpp.costs.footprint import Footprint
from lightning_gpp.costs.model import CostModel, Seconds
from lightning_gpp.costs.roofline import Roofline
from lightning_gpp.graph import Affine, Operator, OperatorGraph
from lightning_gpp.plan import SOURCE, Plan, Stage
from lightning_gpp.planning.assignment.assign import assign
from lightning_gpp.planning.assignment.slices import sliced_costs
from lightning_gpp.schedules.messages import carries_gradient
from lightning_gpp.simulation.stage_costs import StageCost, StageCosts
from lightning_gpp.slices import is_sliced, unsliced


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

    Seconds are exact in the model for the share of a whole micro-batch and for 1 sample, affine in between. The user's
    Python before the network costs nothing.

    Args:
        graph: what the plan was made from.
        plan: the stages; device d of pipeline p is the cluster's device p x plan.num_devices + d, and of these devices
            the slowest counts.
        cluster: devices and links.
        costs: seconds of operators; by default the roofline model.
        footprint: what a device keeps per byte of parameters; float32 and Adam by default.
        num_pipelines: copies of the pipeline, whose gradients are summed.
    """
    if is_sliced(plan):
        whole = unsliced(plan)
        costs_of_whole = estimate(graph, whole.plan, cluster, costs, footprint=footprint, num_pipelines=num_pipelines)
        return sliced_costs(costs_of_whole, plan, whole, graph)
    operators, costs = _operators(graph, plan), costs or Roofline(graph)
    kinds = {
        device: {cluster.kind(device + pipeline * plan.num_devices) for pipeline in range(num_pipelines)}
        for device in range(plan.num_devices)
    }
    by_kind = {
        (stage, kind): _stage_cost(operators[stage], plan, stage, cluster.kinds[kind], costs)
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
        all_reduce=tuple(_all_reduce(plan, stage, cluster, num_pipelines) for stage in range(len(plan.stages))),
        ranks=tuple(len(stage.devices) * num_pipelines for stage in plan.stages),
        parameter_copies=(footprint or Footprint()).copies,
    )


def _slowest(candidates: Sequence[StageCost], stage: Stage) -> StageCost:
    """The pipelines wait for each other when they sum their gradients, so the slowest one's device counts."""
    share = -(-stage.micro_batch_size // len(stage.devices))
    return max(candidates, key=lambda cost: cost.forward.at(share) + cost.backward.at(share))


def _operators(graph: OperatorGraph, plan: Plan) -> list[list[Operator]]:
    assignment = assign(graph, [stage.modules for stage in plan.stages])
    operators: list[list[Operator]] = [[] for _ in plan.stages]
    for operator in graph:
        for stage in assignment[operator.name]:
            if stage != SOURCE:
                operators[stage].append(operator)
    return operators


def _all_reduce(plan: Plan, stage: int, cluster: Cluster, num_pipelines: int) -> float:
    devices = [
        device + pipeline * plan.num_devices for pipeline in range(num_pipelines) for device in plan.devices_of(stage)
    ]
    return cluster.all_reduce_seconds(devices, plan.stages[stage].figures.parameter_bytes)


def _stage_cost(operators: Sequence[Operator], plan: Plan, index: int, kind: Device, costs: CostModel) -> StageCost:
    stage = plan.stages[index]
    share = max(2, -(-stage.micro_batch_size // len(stage.devices)))
    points = {}
    for samples in (1, share):
        seconds = [costs.seconds(operator, samples, kind) for operator in operators]
        points[samples] = [
            sum(s.forward for s in seconds),
            sum(s.backward for s in seconds),
            _weight(plan, index, seconds),
        ]
    forward, backward, weight = (_through({samples: point[i] for samples, point in points.items()}) for i in range(3))
    saved = stage.figures.activation_bytes
    received = sum((edge.bytes for edge in plan.edges if edge.dst == index), Affine())
    return StageCost(
        forward=forward,
        backward=backward,
        weight=weight,
        activation_bytes=received if stage.recompute else saved,
        working_bytes=saved if stage.recompute else Affine(),
        pending_bytes=stage.figures.pending_bytes,
        parameter_bytes=stage.figures.parameter_bytes,
    )


def _weight(plan: Plan, index: int, seconds: Sequence[Seconds]) -> float:
    """Seconds of the weight gradients; 0 for a stage that no other waits for, which computes all gradients at once."""
    waited_for = any(edge.dst == index and carries_gradient(edge) and not edge.artificial for edge in plan.edges)
    return sum(entry.weight_gradient for entry in seconds) if waited_for else 0.0


def _through(points: Mapping[int, float]) -> Affine:
    """The affine function through two points.

    The roofline is convex and grows no faster than its argument, so this is never negative, and never below the model
    in between.
    """
    (first, low), (last, high) = sorted(points.items())
    slope = (high - low) / (last - first)
    return Affine(slope, low - slope * first)
