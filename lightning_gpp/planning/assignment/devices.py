"""Device numbers of stages, and the number of pipeline replicas that fill a job."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.plan import Plan


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
            f"(trainer.devices x trainer.num_nodes). Use one of {_divisors(world_size)}, or other devices."
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
            f"The plan needs {needed} devices, the job has {world_size} (trainer.devices x trainer.num_nodes). "
            f"Set trainer.devices={needed}, or make a plan with fewer stages."
        )
    if world_size % needed:
        raise PlanError(
            f"The plan needs {needed} devices, the job has {world_size} (trainer.devices x trainer.num_nodes), which "
            f"is not a multiple of it. Set trainer.devices to {needed} or {needed * (world_size // needed + 1)}."
        )
    return world_size // needed


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
