"""Side channels between processes: for small facts that all ranks of a pipeline must know and objects during set-up
(`Control`), and for what all ranks get from the first one, such as mini-batches and random streams (`Mirror`).

`Control` uses gloo and CPU tensors on any accelerator, so that it never queues behind the messages of the stages.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.errors import GPPError
from lightning_gpp.failure.hangs import Wait
from lightning_gpp.runtime.mesh import Mesh
from lightning_gpp.runtime.transport import as_sent
from lightning_gpp.wording import warn

UNDERWAY: Final = 256
"""The most outstanding messages from the step's rank to each other rank. Ranks of a pipeline that does not flush are a
few mini-batches apart, with a handful of messages for each.
"""

_TOGETHER: Final = "all ranks to come to the same point of the program"
_LENGTH, _HEAD = 8, 1 << 11
"""Bytes of an object's length, and of its first message with this: the facts of a step fit into it."""


class Control:
    """Communication of control values between the processes of a mesh.

    Members of a device have the same values. So a process gets values of other ranks from one member of each
    (`Mesh.process`), and sums count every device once.

    Attributes:
        runs_step: whether this rank runs the user's step.
        loads: whether this process loads the data of its pipeline; the first of those that run the step.
        first: whether this is the first process of the job.
        sole: whether the pipeline consists of this process.
        step_rank: rank that runs the user's step for this pipeline.
        everyone: all processes of the job.
        wait: what this rank waits for now.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rank, self.world_size = mesh.rank, mesh.world_size
        self.num_devices, self.num_pipelines = mesh.num_devices, mesh.num_pipelines
        self.pipeline, self.device = mesh.pipeline, mesh.device
        self.num_members, self.member = mesh.num_members, mesh.member
        self.num_processes, self.everyone = mesh.num_processes, mesh.control_group
        self._pipeline_group = mesh.pipeline_control_group
        self.wait: Wait | None = None
        self._told: deque[tuple[Tensor, list[Any]]] = deque()
        self.runs_step = self.device == 0
        self.loads = self.runs_step and self.member == 0
        self.first = self.rank == 0 and self.member == 0
        self.step_rank, *others = mesh.pipeline_ranks()
        self._source = mesh.number_in_pipeline(mesh.process(self.step_rank))
        self._receivers = [mesh.number_in_pipeline(mesh.process(rank)) for rank in others if self.runs_step]
        self.sole = self.num_devices == self.num_members == 1

    def share(self, numbers: Tensor) -> Tensor:
        """Broadcast numbers (a CPU tensor, in place) from the step's rank to all ranks of its pipeline.

        The step's rank does not wait for the others, which may be behind.
        """
        if self.runs_step:
            self._tell(numbers, self._receivers, self._pipeline_group)
        else:
            self._receive_numbers(numbers, self._source, self._pipeline_group)
        return numbers

    def share_loaded(self, flag: bool) -> bool:
        """Broadcast a flag from the process that loads the data to all processes of its pipeline."""
        numbers = torch.tensor([flag])
        if self.runs_step:
            self.share_in_device(numbers)
        return bool(self.share(numbers))

    def share_in_device(self, numbers: Tensor) -> Tensor:
        """Broadcast numbers (a CPU tensor, in place) from the first member of this device to the others."""
        group = self.mesh.member_control_group
        if group is None:
            return numbers
        if self.member == 0:
            self._tell(numbers, range(1, self.num_members), group)
        else:
            self._receive_numbers(numbers, 0, group)
        return numbers

    def sum(self, numbers: Tensor) -> Tensor:
        """Add numbers (a CPU tensor, in place) of the processes that load data, of all pipelines, on all processes."""
        if self.num_pipelines == 1:
            return self.share(numbers)
        if not self.loads:
            numbers.zero_()
        with self._waiting(_TOGETHER):
            dist.all_reduce(numbers, group=self.everyone)
        return numbers

    def sum_later(self, numbers: Tensor) -> dist.Work | None:
        """Start to sum numbers (a CPU tensor, in place) over all ranks of the pipeline; wait for the result.

        All ranks start their sums in the same order. Returns None if there is only one rank.
        """
        if self.num_devices == 1:
            return None
        if self.member > 0:
            numbers.zero_()
        work: dist.Work = dist.all_reduce(numbers, group=self._pipeline_group, async_op=True)
        return work

    def share_flag(self, flag: bool) -> bool:
        """Broadcast a flag from the step's rank to all ranks of its pipeline; the step's rank does not wait."""
        return bool(self.share(torch.tensor([flag])))

    def share_pairs(self, pairs: Sequence[tuple[int, int]]) -> Sequence[Sequence[int]]:
        """Broadcast pairs of numbers from the step's rank to all ranks of its pipeline, which give equally many."""
        if self.sole:
            return pairs
        shared: list[list[int]] = self.share(torch.tensor(pairs)).tolist()
        return shared

    def share_object(self, value: Any) -> Any:
        """Broadcast a picklable object from the step's rank to its pipeline's ranks; the step's rank does not wait."""
        if self.num_devices == 1:
            return value
        return self._object_from_first(value, self.share, self.runs_step)

    def share_object_in_device(self, value: Any) -> Any:
        """Broadcast a picklable object from the first member of this device to the others."""
        if self.num_members == 1:
            return value
        return self._object_from_first(value, self.share_in_device, self.member == 0)

    def _object_from_first(self, value: Any, share: Callable[[Tensor], Tensor], mine: bool) -> Any:
        """The value in one message, or in two if it is long: the first says how long it is."""
        content = pickle.dumps(value) if mine else b""
        head = len(content).to_bytes(_LENGTH, "little") + content[: _HEAD - _LENGTH]
        first = share(_as_bytes(head.ljust(_HEAD, b"\0"))).numpy().tobytes()
        length = int.from_bytes(first[:_LENGTH], "little")
        if length <= _HEAD - _LENGTH:
            return value if mine else pickle.loads(first[_LENGTH : _LENGTH + length])
        rest = share(_as_bytes((content if mine else bytes(length))[_HEAD - _LENGTH :]))
        return value if mine else pickle.loads(first[_LENGTH:] + rest.numpy().tobytes())

    def relay(self, number: int) -> int:
        """The number of the first process, on every one; a process that has it does not wait for those without."""
        numbers, (first, *others) = torch.tensor([number]), self.mesh.replica_ranks(0)
        if self.rank == first:
            self.share_in_device(numbers)
            self._tell(numbers, [self.mesh.process(rank) for rank in others], self.everyone)
        elif self.runs_step:
            self._receive_numbers(numbers, self.mesh.process(first), self.everyone)
        return int(self.share(numbers))

    def _receive_numbers(self, numbers: Tensor, src: int, group: dist.ProcessGroup) -> None:
        process = dist.get_global_rank(group, src)
        with self._waiting(f"numbers from rank {process}, which it sends before and after each step", process):
            dist.recv(numbers, group_src=src, group=group)

    @contextmanager
    def _waiting(self, what: str, *ranks: int) -> Iterator[None]:
        """Inside, this process waits for others, by default for all."""
        others = ranks or tuple(rank for rank in range(self.num_processes) if rank != self.mesh.own_process)
        self.wait = Wait(what=what, ranks=others)
        yield
        self.wait = None

    def _tell(self, numbers: Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        """Send numbers to other members of a group, and keep a copy of them until it has arrived."""
        if not ranks:
            return
        numbers = numbers.clone()
        works = [dist.isend(numbers, group=group, group_dst=rank) for rank in ranks]
        self._told.append((numbers, works))
        if len(self._told) > UNDERWAY:
            with self._waiting("the other ranks to take its numbers"):
                for work in self._told.popleft()[1]:
                    work.wait()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Broadcast a picklable object from process `src` to all processes."""
        if self.num_processes == 1:
            return value
        others = [] if src == self.mesh.own_process else [src]
        with self._waiting(f"an object from rank {src}, or for those that take it", *others):
            values = [value]
            dist.broadcast_object_list(values, src=src, group=self.everyone)
            return values[0]

    def from_first(self, make: Callable[[], Any]) -> Any:
        """The result of a function that the first process calls, on all processes.

        Raises:
            GPPError: on all processes, what the function raises.
        """
        try:
            outcome = make() if self.first else None
        except GPPError as error:
            outcome = error
        outcome = self.broadcast(outcome)
        if isinstance(outcome, GPPError):
            raise outcome.with_traceback(None)
        return outcome

    def gather(self, value: Any) -> list[Any]:
        """Gather the objects of all ranks on all ranks."""
        values = self.gather_all(value)
        return [values[self.mesh.process(rank)] for rank in range(self.world_size)]

    def gather_in_pipeline(self, value: Any) -> list[Any]:
        """Gather the objects of the processes of this pipeline on all of them."""
        return self._gathered(value, self._pipeline_group, dist.get_world_size(self._pipeline_group))

    def gather_all(self, value: Any) -> list[Any]:
        """Gather the objects of all processes on all processes."""
        return self._gathered(value, self.everyone, self.num_processes)

    def gather_in_device(self, value: Any) -> list[Any]:
        """Gather the objects of the members of this device on all of them."""
        group = self.mesh.member_control_group
        return [value] if group is None else self._gathered(value, group, self.num_members)

    def _gathered(self, value: Any, group: dist.ProcessGroup, size: int) -> list[Any]:
        values: list[Any] = [None] * size
        with self._waiting(_TOGETHER):
            dist.all_gather_object(values, value, group=group)
        return values

    def unanimous(self, decision: bool, everyone: bool) -> bool:
        """True if all processes (`everyone`), or any, decided yes."""
        yes = torch.tensor(int(decision))
        with self._waiting(_TOGETHER):
            dist.all_reduce(yes, dist.ReduceOp.MIN if everyone else dist.ReduceOp.MAX, group=self.everyone)
        return bool(yes)

    def warn(self, text: str) -> None:
        """Warn once for all processes, on the first one."""
        if self.first:
            warn(text, stacklevel=3)

    def barrier(self) -> None:
        with self._waiting(_TOGETHER):
            dist.barrier(group=self.everyone)

    def send_tree(self, tree: Any, dst: int) -> None:
        """Send a structure that contains tensors to a process: its outline as an object, then the tensors."""
        leaves, outline = _outlined(tree)
        dist.send_object_list([outline], group_dst=dst, group=self.everyone)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                dist.send(leaf.detach().cpu().contiguous(), group_dst=dst, group=self.everyone)

    def receive_tree(self, src: int) -> Any:
        """Receive the tree that `send_tree` sent; tensors are on the CPU."""
        received: list[Any] = [None]
        dist.recv_object_list(received, group_src=src, group=self.everyone)
        outline, spec = received[0]
        leaves = [self._receive(leaf, src) if isinstance(leaf, _Outline) else leaf for leaf in outline]
        return pytree.tree_unflatten(leaves, spec)

    def pass_on(self, tensor: Tensor, source: int, others: Sequence[int]) -> None:
        """Give a tensor's values of one process to others. All of them call this."""
        if self.mesh.own_process == source:
            for process in others:
                dist.send(tensor.detach().cpu().contiguous(), group_dst=process, group=self.everyone)
        elif self.mesh.own_process in others:
            received = torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.recv(received, group_src=source, group=self.everyone)
            with torch.no_grad():
                tensor.copy_(received)

    def _receive(self, outline: _Outline, src: int) -> Tensor:
        tensor = torch.empty(outline.shape, dtype=outline.dtype)
        dist.recv(tensor, group_src=src, group=self.everyone)
        return tensor


class _Outline:
    """The form of a tensor that follows."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.on_cpu = tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu"


def _outlined(tree: Any) -> tuple[list[Any], tuple[list[Any], Any]]:
    """The leaves of a structure; and the same with forms of tensors, with the structure."""
    leaves, structure = pytree.tree_flatten(tree)
    return leaves, ([_Outline(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def _as_bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class Mirror:
    """Broadcasts from the rank that loads the data to all ranks of its pipeline, which call this together.

    Args:
        control: the side channel of this rank.
        device: the device of this rank.
    """

    def __init__(self, control: Control, device: torch.device) -> None:
        self._control, self._device = control, device

    def tree(self, tree: Any) -> Any:
        """A structure of tensors and values; tensors on an accelerator come to that of each rank."""
        control = self._control
        if control.num_devices == 1:
            return tree
        return self._shared(tree, control.runs_step, control.share_object, self.tensor)

    def in_device(self, tree: Any) -> Any:
        """A structure of tensors and values of the first member of this device, on all members."""
        control = self._control
        if control.num_members == 1:
            return tree
        return self._shared(tree, control.member == 0, control.share_object_in_device, self._tensor_in_device)

    def _shared(self, tree: Any, mine: bool, share: Callable[[Any], Any], fill: Callable[[Tensor], Tensor]) -> Any:
        leaves, described = _outlined(tree)
        outline, structure = share(described if mine else None)
        pairs = zip(leaves if mine else outline, outline, strict=True)
        return pytree.tree_unflatten([self._leaf(*pair, mine, fill) for pair in pairs], structure)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Fill a contiguous tensor, of the same form on all ranks, with the values of the first rank; returns it."""
        mesh = self._control.mesh
        group = mesh.pipeline_control_group if tensor.device.type == "cpu" else mesh.pipeline_group
        if self._control.num_devices > 1:
            dist.broadcast(as_sent(tensor), group_src=0, group=group)
        return tensor

    def _tensor_in_device(self, tensor: Tensor) -> Tensor:
        mesh = self._control.mesh
        group = mesh.member_control_group if tensor.device.type == "cpu" else mesh.member_group
        dist.broadcast(as_sent(tensor), group_src=0, group=group)
        return tensor

    def streams(self) -> None:
        """Continue the user's random streams of the first rank: Python's, NumPy's, and torch's on CPU and device."""
        control = self._control
        if control.num_devices == 1:
            return
        states = control.share_object(self._states() if control.runs_step else None)
        if not control.runs_step:
            self._go_on(states)

    @contextmanager
    def one_stream(self) -> Iterator[None]:
        """Inside, all processes draw the random numbers of the first one; afterwards the others go on with theirs."""
        first, before = self._control.first, self._states()
        self._go_on(self._control.broadcast(before))
        try:
            yield
        finally:
            if not first:
                self._go_on(before)

    def _go_on(self, states: list[Any]) -> None:
        python, numpy, cpu, *accelerator = states
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for state in accelerator:
            torch.cuda.set_rng_state(state, self._device)

    def _states(self) -> list[Any]:
        cuda = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [random.getstate(), np.random.get_state(), torch.get_rng_state(), *cuda]

    def _leaf(self, leaf: Any, outline: Any, mine: bool, fill: Callable[[Tensor], Tensor]) -> Any:
        if not isinstance(outline, _Outline):
            return leaf
        if mine:
            fill(leaf.detach().contiguous())
            return leaf
        device = torch.device("cpu") if outline.on_cpu else self._device
        return fill(torch.empty(outline.shape, dtype=outline.dtype, device=device))
