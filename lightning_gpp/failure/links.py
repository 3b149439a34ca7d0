"""Connections between the ranks' failure monitors: a star of TCP sockets around rank 0 that carries lines of JSON.

Sockets reveal more, and sooner, than keys in a store: the kernel closes a socket as soon as its process ends, for any
reason, and the other side notices without polling. Only a stopped process keeps its socket open, which heartbeats
reveal. The star costs rank 0 one small message per rank and tick, and every other rank one per tick.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch.distributed as dist

from lightning_gpp.errors import PeerFailure
from lightning_gpp.failure.processes import ProcessIdentity

PeerMessage = dict[str, Any]

_CHUNK: Final = 1 << 16
_BACKLOG_LIMIT: Final = 1 << 20
"""Bytes to keep for a peer that does not read. A peer with more must be stopped, and needs no heartbeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of rank 0; the token keeps out connections of other jobs and port scanners."""

    host: str
    port: int
    token: str


class PeerLink:
    """One connection to the monitor of another rank: complete messages over a socket that never blocks."""

    def __init__(self, connection: socket.socket, rank: int, process: ProcessIdentity) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.socket = connection
        self.rank = rank
        self.process = process
        self.heard = time.monotonic()
        """Time of the last message of the peer."""
        self.action = ""
        """The last activity that the peer reported."""
        self.done = False
        """True after the peer said that it has finished and may close the connection."""
        self._unsent = b""
        self._unread = b""

    def send(self, message: PeerMessage) -> None:
        """Send as much as the peer reads; the rest is sent by the next call."""
        if len(self._unsent) < _BACKLOG_LIMIT:
            self._unsent += _encode(message)
        self.flush()

    def flush(self) -> None:
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :] if self._unsent else b""
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""  # the peer has ended, which reading will show

    def receive(self) -> tuple[list[PeerMessage], bool]:
        """Received messages, and True if the connection has ended."""
        while chunk := self._read():
            self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        if lines:
            self.heard = time.monotonic()
        return [json.loads(line) for line in lines], chunk is not None

    def close(self) -> None:
        self.socket.close()

    def _read(self) -> bytes | None:
        """Received bytes: empty at the end of the connection, None if there are none yet."""
        try:
            return self.socket.recv(_CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return b""


class Listener:
    """The socket on which rank 0 accepts the other ranks."""

    def __init__(self) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=both)
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        self.address = Address(host=host, port=self._socket.getsockname()[1], token=secrets.token_hex(16))

    def accept(self, world_size: int, patience: float) -> dict[int, PeerLink]:
        """Links to all other ranks. Raises PeerFailure with the ranks that are missing after `patience` seconds."""
        links: dict[int, PeerLink] = {}
        deadline = time.monotonic() + patience
        with self._socket:
            while len(links) < world_size - 1:
                try:
                    link = self._accept_one(deadline)
                except TimeoutError:
                    raise _missing(set(range(1, world_size)) - links.keys(), patience) from None
                if link is not None:
                    links[link.rank] = link
        return links

    def _accept_one(self, deadline: float) -> PeerLink | None:
        self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        connection, _ = self._socket.accept()
        hello = _hello(connection)
        if not hmac.compare_digest(str(hello.get("token")), self.address.token):
            connection.close()
            return None
        connection.sendall(_encode(_introduction(0, self.address.token)))
        return PeerLink(connection, hello["rank"], ProcessIdentity(**hello["process"]))


def connect(address: Address, rank: int, patience: float) -> dict[int, PeerLink]:
    """The link of another rank to rank 0. Raises PeerFailure if rank 0 does not answer within `patience` seconds."""
    try:
        connection = socket.create_connection((address.host, address.port), timeout=patience)
        connection.sendall(_encode(_introduction(rank, address.token)))
        hello = _hello(connection, patience)
        return {0: PeerLink(connection, 0, ProcessIdentity(**hello["process"]))}
    except (OSError, KeyError) as error:
        raise PeerFailure(
            f"Rank {rank} cannot reach rank 0's failure monitor at {address.host}:{address.port} ({error!r}). "
            "MASTER_ADDR must be an address of rank 0's host that all hosts can reach, without a firewall in between."
        ) from error


def exchange_through(group: dist.ProcessGroup | None = None) -> Callable[[Address | None], Address]:
    """A function that sends rank 0's address to all, by a broadcast in `group` (default: the default process group)."""

    def exchange(address: Address | None) -> Address:
        box = [address]
        dist.broadcast_object_list(box, src=0, group=group)
        if box[0] is None:
            raise PeerFailure("Rank 0 did not publish the address of its failure monitor.")
        return box[0]

    return exchange


def _introduction(rank: int, token: str) -> PeerMessage:
    return {"rank": rank, "token": token, "process": asdict(ProcessIdentity.current())}


def _hello(connection: socket.socket, patience: float = 5.0) -> PeerMessage:
    """The first message of a connection; empty if the peer is not a monitor of this job."""
    connection.settimeout(patience)
    try:
        message = json.loads(b"".join(_first_line(connection)))
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


def _first_line(connection: socket.socket) -> Iterator[bytes]:
    for _ in range(4096):
        byte = connection.recv(1)
        if byte in (b"", b"\n"):
            return
        yield byte


def _encode(message: PeerMessage) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _missing(ranks: set[int], patience: float) -> PeerFailure:
    return PeerFailure(
        f"The failure monitors of ranks {sorted(ranks)} did not connect to rank 0 within {patience:.0f} s. "
        "Their processes have ended, or cannot reach rank 0's host (MASTER_ADDR, firewall)."
    )
