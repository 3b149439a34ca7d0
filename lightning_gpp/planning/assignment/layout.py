"""Layouts with several stages per device: which device gets which stages.

Stages are lined up by their distance to the sink, so that branches are side by side, and the line is laid over the
devices:

    looped, 4 devices    0 1 2 3 0 1 2 3       zigzag    0 1 2 3 3 2 1 0

Then devices are renumbered so that the user's step is on device 0. A bidirectional layout adds to every stage a replica
on the mirrored device, and the replicas take micro-batches in turn.

Sources: Megatron-LM (Narayanan et al., SC'21) for loops, Hanayo (Liu et al., SC'23) for waves, Chimera (Li and Hoefler,
SC'21) for both directions.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.planning.assignment.complete import separated
from lightning_gpp.schedules.interleaved import line
from lightning_gpp.schedules.registry import method_of


def lay_out(plan: Plan, graph: OperatorGraph, num_devices: int) -> Plan:
    """The plan with its stages, each on one device, laid out over `num_devices` devices as its schedule requires.

    Raises:
        ConfigError: there are fewer stages than devices.
    """
    method = method_of(plan.schedule)
    plan = laid_out(plan, num_devices, method.layout)
    return both_ways(graph, plan) if method.bidirectional else plan


def lay_out_by_hand(plan: Plan, graph: OperatorGraph, stages_per_device: int | None = None) -> Plan:
    """The plan with stages that the user chose, each on one device, laid out as its schedule requires.

    Args:
        plan: the stages, and the name of the schedule.
        graph: the model's operators.
        stages_per_device: the user's number; by default the schedule's.
    """
    method = method_of(plan.schedule)
    number = stages_per_device or method.stages_per_device
    num_stages = sum(stage.modules != (STEP,) for stage in plan.stages)
    if number > 1:
        plan = laid_out(plan, -(-num_stages // number), method.layout)
    return both_ways(graph, plan) if method.bidirectional else plan


def laid_out(plan: Plan, num_devices: int, layout: str) -> Plan:
    """The plan with its stages, each on one device, laid over `num_devices` devices.

    A stage with nothing but the user's step is left out of the line, and runs on device 0.

    Raises:
        ConfigError: there are fewer stages than devices.
    """
    stages = [stage for stage in line(plan) if plan.stages[stage].modules != (STEP,)]
    if len(stages) < num_devices:
        raise ConfigError(
            f"{len(stages)} stages cannot be laid out over {num_devices} devices. Give more stages (strategy.stages)."
        )
    devices = {stage: _device_at(position, num_devices, layout) for position, stage in enumerate(stages)}
    device = _renumbered(devices, devices.get(plan.step_stage, 0), num_devices)
    placed = (replace(stage, devices=(device.get(i, 0),)) for i, stage in enumerate(plan.stages))
    return replace(plan, stages=tuple(placed))


def both_ways(graph: OperatorGraph, plan: Plan) -> Plan:
    """The plan with a second replica of every stage on the mirrored device; the user's step stays on device 0 alone."""
    last = plan.num_devices - 1
    stages: list[Stage] = []
    for stage in separated(plan.stages):
        (device,) = stage.devices
        if stage.modules == (STEP,):
            stages.append(replace(stage, devices=(0,), round_robin=False, recompute=False, offload=False))
        else:
            twofold = 2 * device != last
            devices = (device, last - device) if twofold else (device,)
            stages.append(replace(stage, devices=devices, round_robin=twofold))
    made = make_plan(graph, stages, batch_size=plan.batch_size, schedule=plan.schedule, model=plan.model)
    return replace(made, tensor_parallel_size=plan.tensor_parallel_size)


def _device_at(position: int, num_devices: int, layout: str) -> int:
    lap, place = divmod(position, num_devices)
    back = layout == "zigzag" and lap % 2
    return num_devices - 1 - place if back else place


def _renumbered(devices: dict[int, int], first: int, num_devices: int) -> dict[int, int]:
    """Device numbers after reversing or rotating the line so that `first` is device 0; neighbours stay neighbours."""
    if first == num_devices - 1:
        return {stage: num_devices - 1 - device for stage, device in devices.items()}
    return {stage: (device - first) % num_devices for stage, device in devices.items()}


def layout_mismatch(plan: Plan, schedule: str) -> str:
    """Why the plan's layout does not suit the schedule; empty if it does."""
    method, stages = method_of(schedule), [stage for stage in plan.stages if stage.modules != (STEP,)]
    if method.bidirectional and not any(stage.round_robin for stage in stages):
        return (
            "it runs in both directions, which needs a second replica of every stage on the mirrored device; the two "
            "take micro-batches in turn (round_robin)."
        )
    held = sum(1 if method.bidirectional else len(stage.devices) for stage in stages)
    if -(-held // plan.num_devices) < method.stages_per_device:
        return (
            f"it is made for {method.stages_per_device} stages per device; the plan has {held} on {plan.num_devices} "
            "devices."
        )
    return ""


# -- numbers of devices -----------------------------------------------------------------------------------------------


def number_devices(plan: Plan) -> Plan:
    """One device per stage, numbered from the sink backwards: the stage of the user's step is on device 0."""
    order = sorted(range(len(plan.stages)), key=lambda stage: (stage != plan.step_stage, -stage))
    device = {stage: number for number, stage in enumerate(order)}
    stages = tuple(replace(stage, devices=(device[index],)) for index, stage in enumerate(plan.stages))
    return replace(plan, stages=stages)


def devices_per_pipeline(world_size: int, num_pipelines: int | None) -> int:
    """Devices of one pipeline replica: all of them if `num_pipelines` is None.

    Raises:
        ConfigError: the devices cannot be divided into that many equal parts.
    """
    if num_pipelines is None:
        return world_size
    if num_pipelines < 1 or world_size % num_pipelines:
        raise ConfigError(
            f"strategy.num_pipelines={num_pipelines} does not divide the {world_size} devices of the job "
            f"(trainer.devices x trainer.num_nodes). Use one of {_divisors(world_size)}."
        )
    return world_size // num_pipelines


def count_pipelines(plan: Plan, world_size: int) -> int:
    """Number of replicas of the plan's pipeline that fill `world_size` devices.

    Raises:
        PlanError: the plan needs more devices, or the number of devices is not a multiple of those it needs.
    """
    needed = plan.num_devices
    if world_size < needed:
        raise PlanError(
            f"The plan needs {needed} devices, the job has {world_size} (trainer.devices x trainer.num_nodes). Set "
            f"trainer.devices={needed}."
        )
    if world_size % needed:
        raise PlanError(
            f"The plan needs {needed} devices, the job has {world_size} (trainer.devices x trainer.num_nodes), which "
            f"is not a multiple of it. Set trainer.devices={needed}."
        )
    return world_size // needed


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
