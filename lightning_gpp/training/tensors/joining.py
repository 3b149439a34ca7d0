"""The division of a job's processes into pipelines, devices and their members, and the connections between them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from lightning_gpp.errors import ConfigError
from lightning_gpp.planning import devices_per_pipeline
from lightning_gpp.runtime.mesh import Mesh
from lightning_gpp.training.checks.agreement import check_alike, facts_of_options
from lightning_gpp.training.control import Control
from lightning_gpp.training.options import Options
from lightning_gpp.training.planner import devices_wanted


def join(options: Options, rank: int, world_size: int) -> Control:
    """Divide the processes of a job into pipelines, and connect them. All of them call this together.

    Runs of one process share the connections, which last as long as the default process group: other code may
    communicate after a run, for example to save a checkpoint.

    Raises:
        ConfigError: the number of processes is not a multiple of those of a pipeline, or they have different options or
            versions.
    """
    if world_size > 1:
        check_alike(facts_of_options(options))
    if options.delayed_devices and world_size > 1:
        raise ConfigError(
            f"strategy.delayed_devices={options.delayed_devices} imitates a pipeline on one process, but there are "
            f"{world_size} processes. Start one (trainer.devices=1, trainer.num_nodes=1)."
        )
    num_pipelines = pipelines_of(options, world_size)
    members = _members_of(options, world_size, num_pipelines)
    for layout, control in list(_connected.items()):
        if control.mesh.everyone is not dist.group.WORLD:
            del _connected[layout]
    wanted = tuple(members), num_pipelines, options.timeout
    if wanted not in _connected:
        mesh = Mesh(len(members), num_pipelines, rank, members=members, timeout=options.timeout)
        _connected[wanted] = Control(mesh)
    return _connected[wanted]


def disconnect(control: Control) -> None:
    """Let later runs make new connections: in these, messages may be left of ranks that stopped at different points."""
    for layout, known in list(_connected.items()):
        if known is control:
            del _connected[layout]


_connected: Final[dict[tuple[tuple[int, ...], int, timedelta], Control]] = {}
"""The connections of this process, by members of the devices of a pipeline, number of pipelines, and timeout."""


def pipelines_of(options: Options, world_size: int) -> int:
    """Number of pipeline replicas.

    Raises:
        ConfigError: the processes cannot be divided into devices.
    """
    if options.delayed_devices:
        return 1
    first, *others = options.degrees
    if others:
        return options.num_pipelines or max(1, world_size // sum(options.degrees))
    num_devices, rest = divmod(world_size, first)
    if rest or not num_devices:
        raise ConfigError(
            f"strategy.tensor_parallel_size={first} does not divide the {world_size} processes of the job "
            "(trainer.devices x trainer.num_nodes). Start a multiple of it, or choose a divisor."
        )
    return options.num_pipelines or max(1, num_devices // devices_wanted(options, num_devices))


def _members_of(options: Options, world_size: int, num_pipelines: int) -> Sequence[int]:
    """Number of processes of each device of a pipeline."""
    first, *others = options.degrees
    return options.degrees if others else [first] * devices_per_pipeline(world_size // first, num_pipelines)
