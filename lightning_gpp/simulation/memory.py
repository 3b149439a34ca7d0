"""The memory that a program takes on a device, action by action."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.schedules import Action, Kind, Program
from lightning_gpp.schedules.actions import RELEASES
from lightning_gpp.schedules.messages import samples_of
from lightning_gpp.simulation.stage_costs import StageCost, StageCosts


def peak_bytes(program: Program, costs: StageCosts, device: int) -> float:
    """The most that a device holds at any time.

    Always: parameters, gradients and the optimizer's state of its stages; with ZeRO-1 its share of the last, with fsdp
    its shares of all. With fsdp the whole parameters of a stage from their gathering until they are dropped, and its
    whole gradients until they are summed. For a micro-batch in training its activations from the start of the forward;
    from a recomputation on what that makes; after the gradients of the inputs what those of the parameters need,
    until these end. In inference its activations during the forward.
    """
    now = most = 0.0
    for change in changes(program, costs, device):
        now += change
        most = max(most, now)
    return _static(program, costs, device) + most


def _static(program: Program, costs: StageCosts, device: int) -> float:
    plan = program.plan
    split = {"none": 0.0, "zero1": max(0.0, costs.parameter_copies - 2), "fsdp": costs.parameter_copies}[plan.sharding]
    total = 0.0
    for stage in plan.stages_on(device):
        ranks = costs.ranks[stage] if costs.ranks else len(plan.devices_of(stage))
        total += costs.replica(stage, device).parameter_bytes * (costs.parameter_copies - split + split / ranks)
    return total


def changes(program: Program, costs: StageCosts, device: int) -> Iterator[float]:
    """Bytes that are taken or given back, in the order of the program; after a training step all are given back."""
    plan = program.plan
    replicas = {stage: costs.replica(stage, device) for stage in plan.stages_on(device)}
    samples = {stage: samples_of(plan, stage, device, program.batch_size) for stage in replicas}
    kept: dict[tuple[int, int], float] = {}
    whole_gradients: set[int] = set()
    for instruction in program.devices[device]:
        action = instruction.action
        if action is None or action.kind is Kind.DATA:
            continue
        cost = replicas[action.stage]
        if plan.sharding == "fsdp":
            yield _sharded_change(program, action, cost, whole_gradients)
        if action.micro_batch < len(samples[action.stage]):
            yield from _activations(program, action, cost, samples[action.stage][action.micro_batch], kept)


def _sharded_change(program: Program, action: Action, cost: StageCost, whole_gradients: set[int]) -> float:
    if action.kind in (Kind.UNSHARD, Kind.RESHARD):
        return cost.parameter_bytes * (1 if action.kind is Kind.UNSHARD else -1)
    if action.kind is Kind.REDUCE:
        if action.stage not in whole_gradients:  # the replica had no micro-batch
            return 0.0
        whole_gradients.discard(action.stage)
        return -cost.parameter_bytes
    if action.kind in RELEASES and action.stage in program.reduced and action.stage not in whole_gradients:
        whole_gradients.add(action.stage)
        return cost.parameter_bytes
    return 0.0


def _activations(
    program: Program, action: Action, cost: StageCost, num_samples: int, kept: dict[tuple[int, int], float]
) -> Iterator[float]:
    key = (action.stage, action.micro_batch)
    if not num_samples:
        return
    if action.kind is Kind.FORWARD:
        kept[key] = cost.activation_bytes.at(num_samples)
        yield kept[key]
    elif action.kind is Kind.RECOMPUTE:
        kept[key] += cost.working_bytes.at(num_samples)
        yield cost.working_bytes.at(num_samples)
    elif action.kind is Kind.INPUT and cost.pending_bytes is not None:
        left = min(kept[key], cost.pending_bytes.at(num_samples))
        yield left - kept[key]
        kept[key] = left
    if action.kind in RELEASES or (action.kind is Kind.FORWARD and not program.training):
        yield -kept.pop(key)
