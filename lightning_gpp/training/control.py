"""The side channel between processes, for small facts that all ranks of a pipeline must know, and objects during
set-up.

It uses gloo and CPU tensors on any accelerator, so that it never queues behind the messages of the stages.
"""

from __future__ import annotations

import pickle
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.failure.hangs import Wait
from lightning_gpp.runtime.mesh import CONTROL_BACKEND, Mesh

UNDERWAY: Final = 256
"""The most outstanding messages from the step's rank to each other rank. Ranks of a pipeline that does not flush are a
few mini-batches apart, with a handful of messages for each.
"""

_TOGETHER: Final = "all ranks to come to the same point of the program"
_NOTHING: Final = torch.empty(0, dtype=torch.uint8)


class Control:
    """Communication of control values between the ranks of a mesh.

    Attributes:
        runs_step: whether this rank loads data and runs the user's step.
        step_rank: global rank that runs the user's step for this pipeline.
        wait: what this rank waits for now.
        waited: seconds of all waits so far for numbers of the step's rank.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rank, self.world_size = mesh.rank, mesh.world_size
        self.num_devices, self.num_pipelines = mesh.num_devices, mesh.num_pipelines
        self.pipeline, self.device = mesh.pipeline, mesh.device
        self.world, self._pipeline_group = mesh.control_group, mesh.pipeline_control_group
        self.wait: Wait | None = None
        self.waited = 0.0
        self._told: deque[tuple[Tensor, list[Any]]] = deque()
        self.runs_step = self.device == 0
        self.step_rank, *self._others = mesh.pipeline_ranks()

    def share(self, numbers: Tensor) -> Tensor:
        """Broadcast numbers (a CPU tensor, in place) from the step's rank to all ranks of its pipeline.

        The step's rank does not wait for the others, which may be behind.
        """
        if self.num_devices > 1 and self.runs_step:
            self._tell(numbers.clone(), self._others, self._pipeline_group)
        elif self.num_devices > 1:
            self._receive_numbers(numbers, self.step_rank, self._pipeline_group)
        return numbers

    def sum_later(self, numbers: Tensor) -> dist.Work | None:
        """Start to sum numbers (a CPU tensor, in place) over all ranks of the pipeline; wait for the result.

        All ranks start their sums in the same order. Returns None if there is only one rank.
        """
        if self.num_devices == 1:
            return None
        work: dist.Work = dist.all_reduce(numbers, group=self._pipeline_group, async_op=True)
        return work

    def share_flag(self, flag: bool) -> bool:
        """Broadcast a flag from the step's rank to all ranks of its pipeline; the step's rank does not wait."""
        return bool(self.share(torch.tensor([flag])))

    def share_object(self, value: Any) -> Any:
        """Broadcast a picklable object from the step's rank to its pipeline's ranks; the step's rank does not wait."""
        if self.num_devices == 1:
            return value
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if self.runs_step else _NOTHING
        length = self.share(torch.tensor([len(pickled)]))
        received = self.share(pickled if self.runs_step else torch.empty(int(length), dtype=torch.uint8))
        return value if self.runs_step else pickle.loads(received.numpy().tobytes())

    def relay(self, number: int) -> int:
        """The number of global rank 0, on every rank; a rank that has it does not wait for those that have not."""
        numbers, (_, *heads) = torch.tensor([number]), self.mesh.replica_ranks(0)
        if self.rank == 0 and heads:
            self._tell(numbers, heads, self.world)
        elif self.runs_step and heads:
            self._receive_numbers(numbers, 0, self.world)
        return int(self.share(numbers))

    def _receive_numbers(self, numbers: Tensor, src: int, group: dist.ProcessGroup) -> None:
        start = time.perf_counter()
        with self._waiting(f"numbers from rank {src}, which it sends before and after each step", src):
            dist.recv(numbers, src=src, group=group)
        self.waited += time.perf_counter() - start

    @contextmanager
    def _waiting(self, what: str, *ranks: int) -> Iterator[None]:
        """Inside, this rank waits for others, by default for all."""
        others = ranks or tuple(rank for rank in range(self.world_size) if rank != self.rank)
        self.wait = Wait(what=what, ranks=others)
        yield
        self.wait = None

    def _tell(self, numbers: Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        """Send numbers to other ranks, and keep them until they have arrived."""
        works = [dist.isend(numbers, rank, group=group) for rank in ranks]
        self._told.append((numbers, works))
        if len(self._told) > UNDERWAY:
            with self._waiting("the other ranks to take its numbers"):
                for work in self._told.popleft()[1]:
                    work.wait()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Broadcast a picklable object from rank `src` to all ranks."""
        if self.world_size == 1:
            return value
        with self._waiting(
            f"an object from rank {src}, or for those that take it", *([src] if src != self.rank else [])
        ):
            return self._broadcast(value, src, self.world)

    def _broadcast(self, value: Any, src: int, group: dist.ProcessGroup) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=src, group=group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Gather the objects of all ranks on all ranks."""
        values: list[Any] = [None] * self.world_size
        with self._waiting(_TOGETHER):
            dist.all_gather_object(values, value, group=self.world)
        return values

    def unanimous(self, decision: bool, everyone: bool) -> bool:
        """True if all ranks (`everyone`), or any rank, decided yes."""
        yes = torch.tensor(int(decision))
        with self._waiting(_TOGETHER):
            dist.all_reduce(yes, dist.ReduceOp.MIN if everyone else dist.ReduceOp.MAX, group=self.world)
        return bool(yes)

    def warn(self, text: str) -> None:
        """Warn once for all ranks, on global rank 0."""
        if self.rank == 0:
            warnings.warn(text, stacklevel=3)

    def another_world(self) -> dist.ProcessGroup:
        """Another group of all ranks, in which a thread can communicate. All ranks call this together."""
        ranks = tuple(range(self.world_size))
        return self.mesh.groups("background", [ranks], CONTROL_BACKEND)[ranks]

    def barrier(self) -> None:
        with self._waiting(_TOGETHER):
            dist.barrier(group=self.world)

    def send_tree(self, tree: Any, dst: int) -> None:
        """Send a structure that contains tensors: its outline as an object, then the tensors."""
        leaves, spec = pytree.tree_flatten(tree)
        outline = [_Shape(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        dist.send_object_list([(outline, spec)], dst=dst, group=self.world)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                dist.send(leaf.detach().cpu().contiguous(), dst=dst, group=self.world)

    def receive_tree(self, src: int) -> Any:
        """Receive the tree that `send_tree` sent; tensors are on the CPU."""
        received: list[Any] = [None]
        dist.recv_object_list(received, src=src, group=self.world)
        outline, spec = received[0]
        leaves = [self._receive(leaf, src) if isinstance(leaf, _Shape) else leaf for leaf in outline]
        return pytree.tree_unflatten(leaves, spec)

    def _receive(self, shape: _Shape, src: int) -> Tensor:
        tensor = torch.empty(shape.size, dtype=shape.dtype)
        dist.recv(tensor, src=src, group=self.world)
        return tensor


class _Shape:
    """The shape and type of a tensor that follows."""

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype = tuple(tensor.shape), tensor.dtype
