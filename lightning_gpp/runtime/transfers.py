"""Transfers: sends and receives of messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gpp.runtime.boundary import DTYPES, MessageTensors
from lightning_gpp.runtime.stage import Slot
from lightning_gpp.runtime.transport import Transport, Work
from lightning_gpp.schedules.program import Message


@dataclass(slots=True, eq=False)
class TransferLink:
    """State that all transfers of a device share.

    `values` are the tensors of all messages, `device` is where received tensors are allocated, `unfinished` are the
    sends whose arrival is not known yet, oldest first.
    """

    transport: Transport
    values: MessageTensors
    device: torch.device
    unfinished: deque[Send] = field(default_factory=deque)


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
        samples = message.stop - message.start
        self._forms = [(slot.spec.sizes(samples), DTYPES[slot.spec.dtype]) for slot in slots]

    def start(self) -> None:
        receive, peer, device = self._link.transport.receive, self._peer, self._link.device
        buffers = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._forms]
        self._works = [receive(buffer, peer) for buffer in buffers]
        self._link.values[self._message] = buffers

    def wait(self) -> None:
        """Wait until the tensors have arrived."""
        for work in self._works:
            work.wait()
        self._works = ()
