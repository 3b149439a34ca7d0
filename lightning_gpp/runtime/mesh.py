"""Mesh: the assignment of ranks to devices and pipeline replicas, and the process groups along both axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from lightning_gpp.errors import ConfigError

CONTROL_BACKEND: Final = "gloo"
"""Backend for plain Python values, which never go through a GPU."""


class Mesh:
    """Pipeline replicas x devices. Global rank = pipeline * num_devices + device.

    It owns its process groups; all ranks construct the mesh together, after `torch.distributed` was initialised. Each
    group has sockets and threads, so the mesh never makes a second one for the same ranks and purpose.

    Args:
        num_devices: devices of the plan.
        num_pipelines: number of pipeline replicas.
        rank: this process's global rank.
        timeout: timeout of the process groups; None keeps the backend's default.

    Raises:
        ConfigError: the number of processes is not num_devices * num_pipelines.
    """

    def __init__(self, num_devices: int, num_pipelines: int, rank: int, *, timeout: timedelta | None = None) -> None:
        _check_world_size(num_devices, num_pipelines)
        self.num_devices = num_devices
        self.num_pipelines = num_pipelines
        self.rank = rank
        self.pipeline, self.device = divmod(rank, num_devices)
        self.backend = dist.get_backend()
        self.world = dist.group.WORLD
        self._timeout = timeout
        self._tags = itertools.count(1)
        self._groups: dict[tuple[str, tuple[int, ...], str | None], dist.ProcessGroup] = {}
        columns = [self.replica_ranks(device) for device in range(num_devices)]
        rows = [self.pipeline_ranks(pipeline) for pipeline in range(num_pipelines)]
        self.pipeline_group = self._own("pipeline", rows)
        self.replica_group = self._own("replicas", columns)
        self.control_group, self.pipeline_control_group = self._control_groups(rows)

    @property
    def world_size(self) -> int:
        return self.num_devices * self.num_pipelines

    def global_rank(self, device: int, pipeline: int | None = None) -> int:
        """The rank of `device` in `pipeline` (None: this rank's pipeline)."""
        return (self.pipeline if pipeline is None else pipeline) * self.num_devices + device

    def new_tag(self) -> int:
        """A tag for messages over gloo that is unique in this mesh; all ranks call this together."""
        return next(self._tags)

    def pipeline_ranks(self, pipeline: int | None = None) -> tuple[int, ...]:
        """All devices of one pipeline replica, device 0 first."""
        return tuple(self.global_rank(device, pipeline) for device in range(self.num_devices))

    def replica_ranks(self, device: int | None = None) -> tuple[int, ...]:
        """The same device in all pipeline replicas."""
        column = self.device if device is None else device
        return tuple(self.global_rank(column, pipeline) for pipeline in range(self.num_pipelines))

    def groups(
        self, purpose: str, rank_sets: Iterable[Sequence[int]], backend: str | None = None
    ) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The process groups for a purpose of the sets that this rank belongs to; they are created where necessary.

        All ranks of the mesh must call this with the same arguments; groups are created in sorted order.

        Args:
            purpose: calls with the same purpose share groups, so ranks must use these in the same order.
            rank_sets: global ranks of each group.
            backend: "nccl" or "gloo"; by default that of the default group.
        """
        wanted = sorted({tuple(ranks) for ranks in rank_sets})
        for ranks in wanted:
            key = purpose, ranks, backend
            if key not in self._groups:
                self._groups[key] = dist.new_group(list(ranks), timeout=self._timeout, backend=backend)
        return {ranks: self._groups[purpose, ranks, backend] for ranks in wanted if self.rank in ranks}

    def _own(self, purpose: str, rank_sets: Sequence[tuple[int, ...]], backend: str | None = None) -> dist.ProcessGroup:
        (group,) = self.groups(purpose, rank_sets, backend).values()
        return group

    def _control_groups(self, rows: Sequence[tuple[int, ...]]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        everyone = self._own("control", [tuple(range(self.world_size))], CONTROL_BACKEND)
        if self.backend == CONTROL_BACKEND:
            return everyone, self.pipeline_group
        return everyone, self._own("pipeline control", rows, CONTROL_BACKEND)


def _check_world_size(num_devices: int, num_pipelines: int) -> None:
    processes = dist.get_world_size()
    if num_devices * num_pipelines != processes:
        raise ConfigError(
            f"The plan has {num_devices} devices and runs as {num_pipelines} pipeline replicas, which needs "
            f"{num_devices * num_pipelines} processes, but there are {processes} (trainer.devices x "
            "trainer.num_nodes). Start a multiple of the plan's devices, or make a plan for fewer."
        )
