"""Memory of a program on a device: parameters, and the micro-batches in flight, action by action."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.schedules import Action, Kind, Program
from lightning_gpp.schedules.actions import COLLECTIVES, RELEASES
from lightning_gpp.schedules.held_bytes import peak
from lightning_gpp.schedules.messages import samples_of
from lightning_gpp.simulation.stage_costs import StageCost, StageCosts


def peak_bytes(program: Program, costs: StageCosts, device: int) -> float:
    """The most bytes that a device holds at a time.

    They include, at all times, parameters, gradients and optimizer states of its stages; with ZeRO-1 its share of the
    states, with fsdp its shares of all. With fsdp, a stage's unsharded parameters from UNSHARD to RESHARD, and its
    unsharded gradients until REDUCE. In training, micro-batches in flight as `HeldBytes` says; in inference, the
    activations during the forward.
    """
    return _static(program, costs, device) + peak(changes(program, costs, device))


def _static(program: Program, costs: StageCosts, device: int) -> float:
    plan = program.plan
    split = {"none": 0.0, "zero1": max(0.0, costs.parameter_copies - 2), "fsdp": costs.parameter_copies}[plan.sharding]
    total = 0.0
    for stage in plan.stages_on(device):
        ranks = costs.ranks[stage] if costs.ranks else len(plan.devices_of(stage))
        total += costs.replica(stage, device).parameter_bytes * (costs.parameter_copies - split + split / ranks)
    return total


def changes(program: Program, costs: StageCosts, device: int) -> Iterator[float]:
    """Bytes allocated, or freed if negative, in the order of the program. After a training step all are freed."""
    plan = program.plan
    replicas = {stage: costs.replica(stage, device) for stage in plan.stages_on(device)}
    samples = {stage: samples_of(plan, stage, device, program.batch_size) for stage in replicas}
    unreduced: set[int] = set()
    for instruction in program.devices[device]:
        action = instruction.action
        if action is None or action.kind is Kind.DATA:
            continue
        cost = replicas[action.stage]
        if plan.sharding == "fsdp":
            yield _sharded_change(program, action, cost, unreduced)
        if action.micro_batch < len(samples[action.stage]):
            yield from _activations(program, action, cost, samples[action.stage][action.micro_batch])


def _sharded_change(program: Program, action: Action, cost: StageCost, unreduced: set[int]) -> float:
    """Bytes of unsharded parameters and gradients. `unreduced`: stages with gradients since their last REDUCE."""
    if action.kind in (Kind.UNSHARD, Kind.RESHARD):
        return cost.parameter_bytes * (1 if action.kind is Kind.UNSHARD else -1)
    if action.kind is Kind.REDUCE:
        if action.stage not in unreduced:  # the replica had no micro-batch
            return 0.0
        unreduced.discard(action.stage)
        return -cost.parameter_bytes
    if action.kind in RELEASES and action.stage in program.reduced and action.stage not in unreduced:
        unreduced.add(action.stage)
        return cost.parameter_bytes
    return 0.0


def _activations(program: Program, action: Action, cost: StageCost, num_samples: int) -> Iterator[float]:
    if not num_samples or action.kind in COLLECTIVES:
        return
    change = cost.held.changes(num_samples, recomputes=program.plan.stages[action.stage].recompute)[action.kind]
    yield change
    if not program.training:
        yield -change
