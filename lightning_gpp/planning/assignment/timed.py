"""Writes into a plan what its actions are expected to take, for schedules that weigh them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gpp.graph import Affine
from lightning_gpp.plan import SOURCE, Edge, Figures, Plan, Stage
from lightning_gpp.simulation.stage_costs import StageCosts


def timed(plan: Plan, costs: StageCosts, memory_bytes: Sequence[float] = ()) -> Plan:
    """The plan with seconds of its actions and messages, and the memory that every device has for activations.

    The figures travel with the plan, so that every rank makes the same schedule, on whatever machine it was planned.

    Args:
        plan: of one pipeline.
        costs: of its stages.
        memory_bytes: of every device, for everything; empty where there is no limit.
    """
    stages = tuple(_timed_stage(stage, index, costs) for index, stage in enumerate(plan.stages))
    edges = tuple(replace(edge, seconds=_edge_seconds(plan, edge, costs)) for edge in plan.edges)
    room = tuple(_room(plan, costs, device, limit) for device, limit in enumerate(memory_bytes))
    return replace(plan, stages=stages, edges=edges, memory_bytes=room)


def _timed_stage(stage: Stage, index: int, costs: StageCosts) -> Stage:
    """Seconds per samples of a whole micro-batch, of which the slowest replica has its share."""
    cost = max((costs.replica(index, device) for device in stage.devices), key=lambda entry: entry.backward.at(1))
    share = 1 if stage.round_robin else len(stage.devices)
    forward, weight = _shared(cost.forward, share), _shared(cost.weight, share)
    backward = _shared(cost.backward, share)
    inputs = backward - weight
    figures = replace(stage.figures, forward_seconds=forward, input_seconds=inputs, weight_seconds=weight)
    return replace(stage, figures=figures)


def _shared(cost: Affine, num_replicas: int) -> Affine:
    return Affine(cost.per_sample / num_replicas, cost.fixed)


def _edge_seconds(plan: Plan, edge: Edge, costs: StageCosts) -> Affine:
    """Seconds of a micro-batch between the first devices of both ends; 0 on the same device."""
    src, dst = plan.devices_of(edge.src)[0], plan.devices_of(edge.dst)[0]
    if src == dst or edge.artificial:
        return Affine()
    link = costs.cluster.link(src, dst) if costs.cluster else costs.default_link
    fixed = link.seconds(edge.bytes.fixed)
    return Affine(link.seconds(edge.bytes.at(1)) - fixed, fixed)


def _room(plan: Plan, costs: StageCosts, device: int, limit: float) -> float:
    """Bytes that the parameters of a device's stages leave free."""
    held = sum(costs.replica(stage, device).parameter_bytes for stage in plan.stages_on(device))
    return max(0.0, limit - held * costs.parameter_copies)


def with_figures_of(known: Plan, plan: Plan) -> Plan:
    """The plan of another form of the step, with the seconds, the memory and the sharding of the known one.

    Stages are known by their names, edges by those of their ends; what is new keeps its own figures.
    """
    figures = {stage.name: stage.figures for stage in known.stages}
    seconds = {_ends(known, edge): edge.seconds for edge in known.edges}
    stages = tuple(replace(stage, figures=_merged(stage.figures, figures.get(stage.name))) for stage in plan.stages)
    edges = tuple(replace(edge, seconds=seconds.get(_ends(plan, edge), edge.seconds)) for edge in plan.edges)
    same = plan.num_devices == known.num_devices
    memory_bytes = known.memory_bytes if same else ()
    return replace(plan, stages=stages, edges=edges, memory_bytes=memory_bytes, sharding=known.sharding)


def _merged(figures: Figures, known: Figures | None) -> Figures:
    if known is None:
        return figures
    seconds = {name: getattr(known, name) for name in ("forward_seconds", "input_seconds", "weight_seconds")}
    return replace(figures, **seconds)


def _ends(plan: Plan, edge: Edge) -> tuple[str, str]:
    return "" if edge.src == SOURCE else plan.stages[edge.src].name, plan.stages[edge.dst].name
