"""Transfers: sends and receives of messages, also on dynamic edges.

A message on a dynamic edge is a header of fixed size, then the tensors that it describes. The receives of these can
start only after the header has arrived; receives of later messages from the same device start after them, so that the
order of receives is the order of sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gpp.runtime.boundary import DTYPES, Form, MessageTensors, Tensors, header_length, header_of, read_header
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

    `transport` is that of later runs, `loading` the number of runs before, `always` whether every run may need others.
    """

    transport: Transport
    loading: int = 1
    always: bool = False

    def next(self) -> Transport:
        """The transport of the next run."""
        if not self.loading:
            return self.transport
        self.loading -= not self.always
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


class DynamicSend(Send):
    """Send a message on a dynamic edge: the header goes first."""

    def _packed(self) -> list[Tensor]:
        header = header_of(self._link.values[self.message] or ())
        return [header.to(self._link.device), *super()._packed()]


class Receive:
    """Receive a message: `start` allocates buffers and starts, `wait` returns when the tensors have arrived."""

    def __init__(self, link: TransferLink, message: Message, slots: Sequence[Slot]) -> None:
        self._link = link
        self._message, self._peer = message.id, message.src
        self._works: Sequence[Work] = ()
        self._forms: Sequence[Form | None] = [_form(slot, message.stop - message.start) for slot in slots]

    def start(self) -> None:
        self._receive([self._buffer(form) for form in self._forms])

    def wait(self) -> None:
        """Wait until the tensors have arrived."""
        for work in self._works:
            work.wait()
        self._works = ()

    def _buffer(self, form: Form | None) -> Tensor | None:
        return None if form is None else torch.empty(form.shape, dtype=form.dtype, device=self._link.device)

    def _receive(self, buffers: Tensors) -> None:
        receive, peer = self._link.transport.receive, self._peer
        self._works = [receive(buffer, peer) for buffer in buffers if buffer is not None]
        self._link.values[self._message] = buffers


def _form(slot: Slot, num_samples: int) -> Form:
    return Form(slot.spec.sizes(num_samples), DTYPES[slot.spec.dtype])


class DynamicReceive(Receive):
    """Receive a message on a dynamic edge: `start` receives the header, `resolve` starts to receive the tensors."""

    def __init__(self, link: TransferLink, message: Message, slots: Sequence[Slot]) -> None:
        super().__init__(link, message, slots)
        self._length = header_length(len(slots))
        self._header = torch.empty(0)
        self._flags: list[bool] = []

    def start(self) -> None:
        self._header = torch.empty(self._length, dtype=torch.int64, device=self._link.device)
        self._receive([self._header])

    def resolve(self) -> None:
        """Wait for the header, then start receiving the tensors."""
        super().wait()
        self._forms, self._flags = read_header(self._header)
        super().start()

    def wait(self) -> None:
        super().wait()
        for tensor, requires_grad in zip(self._link.values[self._message] or (), self._flags, strict=True):
            if tensor is not None:
                tensor.requires_grad_(requires_grad)


class Inbox:
    """All receives from a device with dynamic messages: starts them in the order in which they were posted.

    Waiting for a message resolves the dynamic ones before it; they were sent earlier, so this cannot block for ever.
    """

    def __init__(self) -> None:
        self._posted: deque[Receive] = deque()
        self._open: DynamicReceive | None = None
        self._started: set[Receive] = set()

    def post(self, receive: Receive) -> None:
        self._posted.append(receive)
        self._advance()

    def wait(self, receive: Receive) -> None:
        while self._open is not None and (receive is self._open or receive not in self._started):
            self._open.resolve()
            self._open = None
            self._advance()
        self._started.discard(receive)
        receive.wait()

    def clear(self) -> None:
        """Forget what was posted."""
        self._posted.clear()
        self._started.clear()
        self._open = None

    def _advance(self) -> None:
        while self._posted and self._open is None:
            receive = self._posted.popleft()
            receive.start()
            self._started.add(receive)
            self._open = receive if isinstance(receive, DynamicReceive) else None
