"""Mesh: the assignment of ranks to devices and pipeline replicas, and the process groups along both axes."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_gpp._compat.torch import DefaultGroup, without_splits
from lightning_gpp.errors import ConfigError
from lightning_gpp.wording import warn

CONTROL_BACKEND: Final = "gloo"
"""Backend for plain Python values, which never go through a GPU."""


class Mesh:
    """Pipeline replicas x devices x members.

    A device of the plan is a group of processes, its members, which share the work inside a stage (tensor parallelism);
    without that it is one process. A rank is a device of a pipeline, and the number of a process if devices have one
    member. Processes are numbered pipeline by pipeline, device by device:

        process      0   1 | 2   3 | 4   5 | 6   7       two pipelines of two devices with two members
        rank         0   0 | 1   1 | 2   2 | 3   3
        member       0   1 | 0   1 | 0   1 | 0   1

    Members of a device compute the same results, so one of them is enough to send these to a process elsewhere: the
    members with the same number form a plane, which is a complete pipeline.

    It owns its process groups; all processes construct the mesh together, after `torch.distributed` was initialised.
    Each group has sockets and threads, so the mesh never makes a second one for the same processes and purpose.

    Args:
        num_devices: devices of the plan.
        num_pipelines: number of pipeline replicas.
        process: this process's global rank.
        members: number of processes of every device.
        timeout: timeout of the process groups; None keeps the backend's default.

    Raises:
        ConfigError: the number of processes is another one.
    """

    def __init__(
        self,
        num_devices: int,
        num_pipelines: int,
        process: int,
        *,
        members: int = 1,
        timeout: timedelta | None = None,
    ) -> None:
        _check_world_size(num_devices, num_pipelines, members)
        self.num_devices, self.num_pipelines, self.num_members = num_devices, num_pipelines, members
        self.own_process = process
        self.rank, self.member = divmod(process, members)
        self.pipeline, self.device = divmod(self.rank, num_devices)
        self._width = num_devices * members
        self.backend = dist.get_backend()
        self.everyone = dist.group.WORLD
        self._timeout = timeout
        self._alone: dist.ProcessGroup | None = None
        self._inside: list[dist.ProcessGroup] = []
        self._device_meshes: dict[str, DeviceMesh] = {}
        self._tags = itertools.count(1)
        self._groups: dict[tuple[str, tuple[int, ...], str | None], dist.ProcessGroup] = {}
        pipelines = [range(start, start + self._width) for start in range(0, self.num_processes, self._width)]
        self.pipeline_group = self._own("pipeline", pipelines)
        self.replica_group = self._own("replicas", self._replicas())
        self.control_group, self.pipeline_control_group = self._control_groups(pipelines)
        self.member_group, self.member_control_group = self._member_groups()

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_devices * self.num_pipelines

    @property
    def num_processes(self) -> int:
        """Number of processes of all pipelines."""
        return self._width * self.num_pipelines

    def process(self, rank: int) -> int:
        """The process of a rank with which this process exchanges messages."""
        return rank * self.num_members + self.member

    def processes(self, rank: int) -> Sequence[int]:
        """All processes of a rank."""
        return range(rank * self.num_members, (rank + 1) * self.num_members)

    @property
    def devices(self) -> list[int]:
        """The device of every process."""
        return [rank % self.num_devices for rank in range(self.world_size) for _ in self.processes(rank)]

    @property
    def members(self) -> list[int]:
        """The processes of this device."""
        return list(self.processes(self.rank))

    def links(self, src: int, dst: int) -> list[tuple[int, int]]:
        """The processes (sender, receiver) that messages from one device to another go between, in all pipelines."""
        pairs = ((self.global_rank(src, number), self.global_rank(dst, number)) for number in range(self.num_pipelines))
        return [link for pair in pairs for link in zip(*map(self.processes, pair), strict=True)]

    def number_in_pipeline(self, process: int) -> int:
        """The number of a process of this pipeline in the pipeline's groups."""
        return process - self.pipeline * self._width

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

    # -- groups -------------------------------------------------------------------------------------------------------

    def groups(
        self, purpose: str, rank_sets: Iterable[Sequence[int]], backend: str | None = None
    ) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The process groups for a purpose of the sets that this rank belongs to; they are created where necessary.

        The members with the same number are a group.

        Args:
            purpose: calls with the same purpose share groups, so ranks must use these in the same order.
            rank_sets: ranks of each group.
            backend: "nccl" or "gloo"; by default that of the default group.
        """
        wanted = sorted({tuple(ranks) for ranks in rank_sets})
        planes = {ranks: list(zip(*map(self.processes, ranks), strict=True)) for ranks in wanted}
        made = self.process_groups(purpose, itertools.chain.from_iterable(planes.values()), backend)
        return {ranks: made[planes[ranks][self.member]] for ranks in wanted if self.rank in ranks}

    def process_groups(
        self, purpose: str, process_sets: Iterable[Sequence[int]], backend: str | None = None
    ) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The groups for a purpose of the sets that this process belongs to; see `groups`.

        All processes of the mesh must call this with the same arguments; groups are created in sorted order.
        """
        wanted = sorted({tuple(processes) for processes in process_sets})
        for processes in wanted:
            key = purpose, processes, backend
            if key not in self._groups:
                self._groups[key] = self._new(processes, backend)
        mine = (processes for processes in wanted if self.own_process in processes)
        return {processes: self._groups[purpose, processes, backend] for processes in mine}

    def _new(self, processes: Sequence[int], backend: str | None) -> dist.ProcessGroup:
        kind = self.backend if backend is None else backend
        with without_splits() if kind == CONTROL_BACKEND else nullcontext(), DefaultGroup(self.everyone):
            group: dist.ProcessGroup = dist.new_group(list(processes), timeout=self._timeout, backend=backend)
        return group

    def device_mesh(self, kind: str) -> DeviceMesh | None:
        """The members of this device as a mesh for users' code, on devices of a kind; None if no device has several.

        It has a second dimension of size 1 for data parallelism, which is not the users' concern. All processes call
        this together.
        """
        if self.num_members == 1:
            return None
        if kind not in self._device_meshes:
            alone = self._own("alone", [[process] for process in range(self.num_processes)])
            groups, names = [alone, self.member_group or alone], ("data_parallel", "tensor_parallel")
            self._device_meshes[kind] = DeviceMesh.from_group(groups, kind, mesh=[self.members], mesh_dim_names=names)
        return self._device_meshes[kind]

    def peers(self, *, alone: bool = False) -> AbstractContextManager[None]:
        """Inside, users' code runs that knows data parallelism only: all of `torch.distributed` means the pipelines.

        So what a step sums over all ranks, and divides by their number, is a mean over mini-batches; with one pipeline
        it is that of one process. It does not matter which ranks of the pipeline run the step.

        Args:
            alone: the other pipelines do not run this code, so this process stands for all.

        Returns:
            A context for one thread, which it may enter any number of times.
        """
        if self.num_members > 1:  # code that divides its work among members knows that there are other processes
            return nullcontext()
        return DefaultGroup(self._only_this() if alone and self.num_pipelines > 1 else self.replica_group, self._inside)

    @property
    def stand_in(self) -> dist.ProcessGroup | None:
        """Inside of `peers`, the group that stands for all processes; else None."""
        return self._inside[-1] if self._inside else None

    def _only_this(self) -> dist.ProcessGroup:
        """A group of this process, which the others need not know."""
        if self._alone is None:
            with without_splits(), DefaultGroup(self.everyone):
                self._alone = dist.new_group([self.own_process], timeout=self._timeout, use_local_synchronization=True)
        return self._alone

    def another_world(self) -> dist.ProcessGroup:
        """Another group of all processes, for a thread; made once. All processes call this together."""
        return self._own("another world", [range(self.num_processes)], CONTROL_BACKEND)

    def _own(
        self, purpose: str, process_sets: Sequence[Sequence[int]], backend: str | None = None
    ) -> dist.ProcessGroup:
        (group,) = self.process_groups(purpose, process_sets, backend).values()
        return group

    def _replicas(self) -> list[Sequence[int]]:
        """The processes with the same place in all pipelines, for each place."""
        return [range(place, self.num_processes, self._width) for place in range(self._width)]

    def _control_groups(self, pipelines: Sequence[Sequence[int]]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        everyone = self._own("control", [range(self.num_processes)], CONTROL_BACKEND)
        if self.backend == CONTROL_BACKEND:
            return everyone, self.pipeline_group
        return everyone, self._own("pipeline control", pipelines, CONTROL_BACKEND)

    def _member_groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The members of this device, for tensors and for control values; None if it has one."""
        devices = [self.processes(rank) for rank in range(self.world_size) if self.num_members > 1]
        group = self.process_groups("members", devices).get(tuple(self.members))
        if self.backend == CONTROL_BACKEND:
            return group, group
        return group, self.process_groups("members", devices, CONTROL_BACKEND).get(tuple(self.members))


def _check_world_size(num_devices: int, num_pipelines: int, members: int) -> None:
    processes, needed = dist.get_world_size(), num_devices * num_pipelines * members
    if needed == processes:
        return
    several = f" with {members} processes per device" if members > 1 else ""
    raise ConfigError(
        f"The plan has {num_devices} devices and runs as {num_pipelines} pipeline replicas{several}, which needs "
        f"{needed} processes, but there are {processes} (trainer.devices x trainer.num_nodes). Start {needed}."
    )


# -- hardware queues --------------------------------------------------------------------------------------------------
# A receive is posted before its message is sent, and occupies its stream until then. A GPU serves all streams of a
# process through a few hardware queues, and streams that share one wait for each other, although nothing in the program
# says so. So a device might wait in front of a send for a message that its receiver can send only after it has got that
# one, and no proof about the program would exclude it. CUDA opens 8 queues by default; as many as
# `CUDA_DEVICE_MAX_CONNECTIONS` says when a process uses its first GPU, at most 32. (NVIDIA, CUDA C++ Programming Guide,
# "Environment Variables"; that streams of several communicators need not progress independently:
# github.com/NVIDIA/nccl/issues/522 and 783.)

QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES: Final = 32
USUAL_QUEUES: Final = 8
"""Hardware queues of a GPU without the variable."""

OTHERS: Final = 3
"""Streams besides those of messages between devices: computing, sums of gradients, and members of the device."""


def open_queues() -> None:
    """Ask CUDA for as many queues as there are, unless the user has decided, or this process uses a GPU already."""
    if not torch.cuda.is_initialized():
        os.environ.setdefault(QUEUES, str(MOST_QUEUES))


def check_queues(links: Iterable[tuple[int, int]], environment: Mapping[str, str]) -> None:
    """Refuse fewer queues than a process has streams.

    Args:
        links: sender and receiver of all messages over NCCL; each process has a stream for each of its links.
        environment: the process's environment.

    Raises:
        ConfigError: CUDA_DEVICE_MAX_CONNECTIONS is too small, or no number.
    """
    text = environment.get(QUEUES, f"{USUAL_QUEUES}")
    ends = Counter(process for link in links for process in link)
    needed = OTHERS + max(ends.values(), default=0)
    if not text.isdecimal() or int(text) < min(needed, MOST_QUEUES):
        raise ConfigError(
            f"{QUEUES}={text}, but a process of the plan has {needed} streams: one for each neighbour and direction, "
            f"and {OTHERS} others. With fewer hardware queues than streams, ranks could wait for each other for ever. "
            f"Set the variable to {MOST_QUEUES} before the process uses a GPU."
        )
    if needed > MOST_QUEUES:
        warn(
            f"A process of the plan has {needed} streams, but a GPU has at most {MOST_QUEUES} hardware queues for "
            "them. Streams that share a queue wait for each other, so ranks could wait for ever. Give its device fewer "
            "neighbours: fewer replicas (strategy.max_replicas), or fewer branches that join (strategy.stages).",
        )
