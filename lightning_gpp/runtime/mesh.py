"""Mesh: the assignment of ranks to devices and pipeline replicas, and the process groups along both axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_gpp._compat.torch import without_splits
from lightning_gpp.errors import ConfigError

CONTROL_BACKEND: Final = "gloo"
"""Backend for plain Python values, which never go through a GPU."""


class Mesh:
    """Pipeline replicas x devices x members. Process = (pipeline * num_devices + device) * num_members + member.

    A device of the plan is a group of processes, its members, which share the work inside a stage (tensor parallelism);
    without that it is one process. The members with the same number in all groups form a plane, which is a complete job
    of its own: its messages and collectives stay inside it. So ranks are counted inside a plane, and a rank is the
    number of a process if there is only one plane.

        process      0   1 | 2   3 | 4   5 | 6   7       two pipelines of two devices with two members
        rank         0   0 | 1   1 | 2   2 | 3   3
        member       0   1 | 0   1 | 0   1 | 0   1

    It owns its process groups; all processes construct the mesh together, after `torch.distributed` was initialised.
    Each group has sockets and threads, so the mesh never makes a second one for the same ranks and purpose.

    Args:
        num_devices: devices of the plan.
        num_pipelines: number of pipeline replicas.
        process: this process's global rank.
        num_members: processes of a device.
        timeout: timeout of the process groups; None keeps the backend's default.

    Raises:
        ConfigError: the number of processes is not num_devices * num_pipelines * num_members.
    """

    def __init__(
        self,
        num_devices: int,
        num_pipelines: int,
        process: int,
        *,
        num_members: int = 1,
        timeout: timedelta | None = None,
    ) -> None:
        _check_world_size(num_devices, num_pipelines, num_members)
        self.num_devices = num_devices
        self.num_pipelines = num_pipelines
        self.num_members = num_members
        self.rank, self.member = divmod(process, num_members)
        self.pipeline, self.device = divmod(self.rank, num_devices)
        self.backend = dist.get_backend()
        self.everyone = dist.group.WORLD
        self._timeout = timeout
        self._background: dist.ProcessGroup | None = None
        self._device_meshes: dict[str, DeviceMesh] = {}
        self._tags = itertools.count(1)
        self._groups: dict[tuple[str, tuple[int, ...], str | None], dist.ProcessGroup] = {}
        columns = [self.replica_ranks(device) for device in range(num_devices)]
        rows = [self.pipeline_ranks(pipeline) for pipeline in range(num_pipelines)]
        self.pipeline_group = self._own("pipeline", rows)
        self.norm_group = self._norm_group(rows)
        self.replica_group = self._own("replicas", columns)
        self.control_group, self.pipeline_control_group = self._control_groups(rows)
        self._connect_members()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_devices * self.num_pipelines

    @property
    def num_processes(self) -> int:
        """Number of processes: ranks times members."""
        return self.world_size * self.num_members

    def process(self, rank: int, member: int | None = None) -> int:
        """The process of a rank (None: in this plane)."""
        return rank * self.num_members + (self.member if member is None else member)

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
            rank_sets: ranks of each group; every plane has its own.
            backend: "nccl" or "gloo"; by default that of the default group.
        """
        wanted = sorted({tuple(ranks) for ranks in rank_sets})
        for ranks in wanted:
            key = purpose, ranks, backend
            if key not in self._groups:
                planes = [[self.process(rank, member) for rank in ranks] for member in range(self.num_members)]
                self._groups[key] = [self._new(processes, backend) for processes in planes][self.member]
        return {ranks: self._groups[purpose, ranks, backend] for ranks in wanted if self.rank in ranks}

    def _new(self, processes: Sequence[int], backend: str | None) -> dist.ProcessGroup:
        kind = self.backend if backend is None else backend
        with without_splits() if kind == CONTROL_BACKEND else nullcontext():
            group: dist.ProcessGroup = dist.new_group(list(processes), timeout=self._timeout, backend=backend)
        return group

    def device_mesh(self, kind: str) -> DeviceMesh | None:
        """The members of this device as a mesh for users' code, on devices of a kind; None if there is only one.

        It has a second dimension of size 1 for data parallelism, which is not the users' concern. All processes call
        this together.
        """
        if self.member_group is None or self.num_members == 1:
            return None
        if kind not in self._device_meshes:
            alone = [self._new([process], None) for process in range(self.num_processes)][self.process(self.rank)]
            groups, names = [alone, self.member_group], ("data_parallel", "tensor_parallel")
            self._device_meshes[kind] = DeviceMesh.from_group(groups, kind, mesh=[self.members], mesh_dim_names=names)
        return self._device_meshes[kind]

    @property
    def members(self) -> list[int]:
        """The processes of this device."""
        return [self.process(self.rank, member) for member in range(self.num_members)]

    def another_world(self) -> dist.ProcessGroup:
        """Another group of all processes, for a thread; made once. All processes call this together."""
        if self._background is None:
            self._background = self._new(range(self.num_processes), CONTROL_BACKEND)
        return self._background

    def _own(self, purpose: str, rank_sets: Sequence[tuple[int, ...]], backend: str | None = None) -> dist.ProcessGroup:
        (group,) = self.groups(purpose, rank_sets, backend).values()
        return group

    def _norm_group(self, rows: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
        """All processes of this pipeline, over which parts of a norm are added."""
        if self.num_members == 1:
            return self.pipeline_group
        every = [[self.process(rank, m) for rank in row for m in range(self.num_members)] for row in rows]
        return [self._new(processes, None) for processes in every][self.pipeline]

    def _control_groups(self, rows: Sequence[tuple[int, ...]]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        everyone = self._own("control", [tuple(range(self.world_size))], CONTROL_BACKEND)
        if self.backend == CONTROL_BACKEND:
            return everyone, self.pipeline_group
        return everyone, self._own("pipeline control", rows, CONTROL_BACKEND)

    def _connect_members(self) -> None:
        """Connect the members of every device, and all processes, where these are more than the ranks."""
        ranks = range(self.world_size)
        self.everyone_group = self.control_group
        self.member_group: dist.ProcessGroup | None = None
        self.member_control_group: dist.ProcessGroup | None = None
        if self.num_members == 1:
            return
        self.everyone_group = self._new(range(self.num_processes), CONTROL_BACKEND)
        every = [[self.process(rank, member) for member in range(self.num_members)] for rank in ranks]
        self.member_group = [self._new(processes, None) for processes in every][self.rank]
        self.member_control_group = self.member_group
        if self.backend != CONTROL_BACKEND:
            self.member_control_group = [self._new(processes, CONTROL_BACKEND) for processes in every][self.rank]


def _check_world_size(num_devices: int, num_pipelines: int, num_members: int) -> None:
    processes, needed = dist.get_world_size(), num_devices * num_pipelines * num_members
    if needed != processes:
        members = f" with {num_members} processes per device" if num_members > 1 else ""
        raise ConfigError(
            f"The plan has {num_devices} devices and runs as {num_pipelines} pipeline replicas{members}, which needs "
            f"{needed} processes, but there are {processes} (trainer.devices x trainer.num_nodes). Start a multiple of "
            "the plan's devices, or make a plan for fewer."
        )
