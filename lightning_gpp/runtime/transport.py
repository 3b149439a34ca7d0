"""Transports move tensors between the devices of a pipeline; transfers are the sends and receives of a program.

Messages of a directed pair match by order alone, as NCCL requires.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.plan import Plan
from lightning_gpp.runtime.boundary import DTYPES, DeviceState, MessageTensors
from lightning_gpp.runtime.bubbles import Bubbles, Work
from lightning_gpp.runtime.mesh import Mesh, check_queues
from lightning_gpp.runtime.stage import Slot
from lightning_gpp.schedules.program import Message

_ADVICE: Final = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
"""Torch's switch for its advice to give each direction a group of its own, which is followed here."""

Pair = tuple[int, int]
"""A directed pair of devices (source, destination) of one pipeline."""

_AS_BYTES: Final = frozenset({torch.complex64, torch.complex128, torch.int16, torch.uint16, torch.uint32, torch.uint64})
"""Types that NCCL does not move; they travel as bytes, on every backend."""


class Transport(Protocol):
    """Moves tensors between the devices of one pipeline, in order per directed pair."""

    def send(self, tensor: Tensor, device: int) -> Work:
        """Start sending; the tensor must not change before the work is done."""
        ...

    def receive(self, buffer: Tensor, device: int) -> Work:
        """Start receiving into a contiguous buffer of exactly the sent shape and dtype."""
        ...

    @property
    def through_host(self) -> Transport:
        """The same by way of host memory: a message in progress occupies no GPU. Its messages match one another."""
        ...


def pairs_of(plan: Plan) -> tuple[Pair, ...]:
    """All directed pairs of devices between which a training program of the plan may send, in sorted order.

    Values go along an edge; gradients come back where it is differentiable.
    """
    pairs: set[Pair] = set()
    for edge in plan.edges:
        for src, dst in itertools.product(plan.devices_of(edge.src), plan.devices_of(edge.dst)):
            pairs.update([(src, dst), (dst, src)] if edge.differentiable else [(src, dst)])
    return tuple(sorted((src, dst) for src, dst in pairs if src != dst))


@dataclass(frozen=True, slots=True)
class _Channel:
    """One direction between this process and one of a device: a process group, the peer's number in it, and whether
    tensors are copied to host memory for it.
    """

    group: dist.ProcessGroup
    peer: int
    staged: bool = False


class DistributedTransport:
    """Transfers over `torch.distributed`: NCCL for CUDA tensors, gloo for CPU tensors.

    On NCCL every directed pair has a process group of its own, so that one direction never waits for the other. Each is
    used once here, in sorted order, because NCCL connects at the first use and blocks until the peer does so, too. gloo
    has no such restriction, so one group serves all pairs. It also serves pairs that were not named here, which an
    evaluation may have whose data flow is not that of training. CUDA tensors over gloo go through host memory. All
    ranks construct it together, with the same pairs.

    A device with several members has the same results on each; members exchange messages with those of their number.

    Args:
        mesh: the mesh of the ranks.
        pairs: directed pairs of devices, the same for every pipeline (see `pairs_of`).
        device: the device of this rank's tensors.
        backend: "nccl" or "gloo"; by default the mesh's.
        own_groups: whether the pairs have groups of their own; by default on all backends but gloo.
        purpose: a transport may take over the groups of one with the same purpose that is not used any more.

    Transports of one mesh never get each other's messages: over gloo each has a tag of its own, on NCCL groups of its
    own.

    A message over NCCL occupies a GPU from the moment its kernel is launched until the peer has launched its own. A
    launch that has to load its kernel first waits for all that is on the GPU, including receives of what other ranks
    can compute only after it. So the ranks would wait for each other for ever, and whoever runs something for the first
    time uses `through_host`.

    Raises:
        ConfigError: on NCCL, the GPUs have fewer hardware queues than streams (see `check_queues`).
    """

    def __init__(
        self,
        mesh: Mesh,
        pairs: Iterable[Pair],
        *,
        device: torch.device | None = None,
        backend: str | None = None,
        own_groups: bool | None = None,
        purpose: str = "",
    ) -> None:
        self._tag = mesh.new_tag()
        self._purpose = purpose or f"transport {self._tag}"
        self._device = device or torch.device("cpu")
        self._backend = backend or mesh.backend
        self._outgoing = self._incoming = self._shared(mesh)
        self.through_host = self
        if self._backend != "gloo" if own_groups is None else own_groups:
            self.through_host = copy.copy(self)
            self.through_host.through_host = self.through_host
            self._outgoing, self._incoming = dict(self._outgoing), dict(self._incoming)
            self._connect(mesh, sorted(set(pairs)))

    def send(self, tensor: Tensor, device: int) -> Work:
        if not tensor.numel():
            return _DONE
        channel, wire = self._outgoing[device], as_sent(tensor.contiguous())
        return channel.group.send([wire.cpu() if channel.staged else wire], channel.peer, self._tag)

    def receive(self, buffer: Tensor, device: int) -> Work:
        if not buffer.numel():
            return _DONE
        channel, wire = self._incoming[device], as_sent(buffer)
        if not channel.staged:
            return channel.group.recv([wire], channel.peer, self._tag)
        host = torch.empty_like(wire, device="cpu")
        return _Staged(channel.group.recv([host], channel.peer, self._tag), host, wire)

    def _shared(self, mesh: Mesh) -> dict[int, _Channel]:
        """Channels to and from all devices in one group over gloo, which connects a pair when it is used."""
        staged, group = self._device.type == "cuda", mesh.pipeline_control_group
        peers = map(mesh.number_in_pipeline, map(mesh.process, mesh.pipeline_ranks()))
        return {device: _Channel(group, peer, staged) for device, peer in enumerate(peers)}

    def _connect(self, mesh: Mesh, pairs: list[Pair]) -> None:
        """Create the groups in one round per direction, because both directions of a pair have the same processes."""
        if self._device.type == "cuda":
            check_queues((link for pair in pairs for link in mesh.links(*pair)), os.environ)
            os.environ.setdefault(_ADVICE, "false")
        for src, dst in pairs:
            links = mesh.process_groups(f"{self._purpose}: {src} to {dst}", mesh.links(src, dst), self._backend)
            for (sender, receiver), group in links.items():
                peer = receiver if mesh.device == src else sender
                channel = _Channel(group, dist.get_group_rank(group, peer))
            if mesh.device == src:
                self._outgoing[dst] = channel
                self._first_use(self.send(torch.zeros(1, device=self._device), dst))
            elif mesh.device == dst:
                self._incoming[src] = channel
                self._first_use(self.receive(torch.zeros(1, device=self._device), src))

    def _first_use(self, work: Work) -> None:
        """Wait until a message has arrived, not only on the GPU: to connect the next pair allocates memory there."""
        work.wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def as_sent(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that every backend moves."""
    return tensor.view(-1).view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor


class _Done:
    """The transfer of an empty tensor."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


_DONE: Final = _Done()


class _Staged:
    """A receive into host memory that ends with a copy to the device."""

    def __init__(self, work: Work, host: Tensor, buffer: Tensor) -> None:
        self._work, self._host, self._buffer = work, host, buffer

    def wait(self) -> None:
        self._work.wait()
        self._buffer.copy_(self._host)

    def is_completed(self) -> bool:
        return False


@dataclass(slots=True, eq=False)
class TransferLink:
    """State that all transfers of a device share.

    `values` are the tensors of all messages, `device` is where received tensors are allocated, `unfinished` are the
    sends whose arrival is not known yet, oldest first, `bubbles` has work for the waits.
    """

    transport: Transport
    values: MessageTensors
    device: torch.device
    unfinished: deque[Send] = field(default_factory=deque)
    bubbles: Bubbles | None = None


@dataclass(slots=True, eq=False)
class Routes:
    """The transports of runs: by way of host memory while kernels may have to be loaded (see `DistributedTransport`).

    `transport` is that of later runs, `loading` the number of runs before.
    """

    transport: Transport
    loading: int = 1

    def next(self) -> Transport:
        """The transport of the next run."""
        if not self.loading:
            return self.transport
        self.loading -= 1
        return self.transport.through_host


class Send:
    """Start sending a message, whose id is `message`; keep its tensors until they have arrived."""

    def __init__(self, link: TransferLink, message: Message) -> None:
        self._link = link
        self.message, self._peer = message.id, message.dst
        self._tensors: Sequence[Tensor] = ()
        self._works: Sequence[Work] = ()

    def run(self) -> None:
        send, peer, unfinished = self._link.transport.send, self._peer, self._link.unfinished
        if self._works:
            self.release()
        self._tensors = self._packed()
        self._works = [send(tensor, peer) for tensor in self._tensors]
        while unfinished and unfinished[0].is_completed():
            unfinished.popleft().release()
        unfinished.append(self)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def release(self) -> None:
        """Wait for the arrival and drop the tensors; the second call does nothing."""
        for work in self._works:
            work.wait()
        self._works = self._tensors = ()

    def _packed(self) -> list[Tensor]:
        values, message = self._link.values, self.message
        tensors, values[message] = values[message], None
        return [tensor.detach().contiguous() for tensor in tensors or () if tensor is not None]


class Receive:
    """Receive a message: `start` allocates buffers and starts, `wait` returns when the tensors have arrived."""

    def __init__(self, link: TransferLink, message: Message, slots: Sequence[Slot]) -> None:
        self._link = link
        self._message, self._peer = message.id, message.src
        self._works: Sequence[Work] = ()
        self._expected = 0.0  # seconds of the wait
        samples = message.stop - message.start
        self._forms = [(slot.spec.sizes(samples), DTYPES[slot.spec.dtype]) for slot in slots]

    def start(self) -> None:
        receive, peer, device = self._link.transport.receive, self._peer, self._link.device
        buffers = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._forms]
        self._works = [receive(buffer, peer) for buffer in buffers]
        self._link.values[self._message] = buffers

    def wait(self) -> None:
        """Wait until the tensors have arrived."""
        bubbles, works = self._link.bubbles, self._works
        if works and bubbles is not None and bubbles.pieces is not None:
            self._expected = bubbles.wait(works[0], self._expected)
            works = works[1:]
        for work in works:
            work.wait()
        self._works = ()


def releasing(wait: Callable[[], None], sends: Sequence[Send], device: DeviceState) -> Callable[[], None]:
    """A wait that proves the arrival of sends and releases them; while the pipeline fills, it proves nothing."""

    def run() -> None:
        wait()
        if device.steady:
            for send in sends:
                send.release()

    return run
