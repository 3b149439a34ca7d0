"""Costs of a plan's stages from the captured operators, by the roofline model; nothing is measured."""

from __future__ import annotations

from lightning_gpp.costs.roofline import (
    BACKWARD_RATIO,
    CPU,
    Device,
    Link,
    has_backward,
    link_of,
    operator_seconds,
    through,
)
from lightning_gpp.graph import Affine, Operator, OperatorGraph
from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.planning.assign import assign
from lightning_gpp.simulation.stage_costs import StageCost, StageCosts


def estimate(graph: OperatorGraph, plan: Plan, *, device: Device = CPU, link: Link | None = None) -> StageCosts:
    """What the stages of a plan cost on devices of one kind.

    Seconds are exact in the model for the stage's micro-batch size and for 1 sample, affine in between. Backwards take
    twice the forwards of those operators that autograd visits. The user's Python before the network costs nothing.

    Args:
        graph: what the plan was made from.
        plan: the stages.
        device: speed of each device.
        link: between any two devices; by default that of the kind of device.
    """
    assignment = assign(graph, [stage.modules for stage in plan.stages])
    operators: list[list[Operator]] = [[] for _ in plan.stages]
    for operator in graph:
        for stage in assignment[operator.name]:
            if stage != SOURCE:
                operators[stage].append(operator)
    return StageCosts(
        stages=tuple(_stage_cost(graph, plan, index, operators[index], device) for index in range(len(plan.stages))),
        default_link=link or link_of(device),
    )


def _stage_cost(graph: OperatorGraph, plan: Plan, index: int, operators: list[Operator], device: Device) -> StageCost:
    stage = plan.stages[index]
    visited = [operator for operator in operators if has_backward(operator)]
    backward = _seconds(graph, visited, stage.micro_batch_size, device)
    return StageCost(
        forward=_seconds(graph, operators, stage.micro_batch_size, device),
        backward=Affine(BACKWARD_RATIO * backward.per_sample, BACKWARD_RATIO * backward.fixed),
        activation_bytes=stage.figures.activation_bytes,
        parameter_bytes=stage.figures.parameter_bytes,
    )


def _seconds(graph: OperatorGraph, operators: list[Operator], num_samples: int, device: Device) -> Affine:
    most = max(2, num_samples)
    first, last = (
        sum(operator_seconds(graph, operator, samples, device) for operator in operators) for samples in (1, most)
    )
    return through(first, last, most)
