"""The start of the watch: ranks find rank 0's port, and only they are let in.

The port is open to the network until all ranks are connected. Whatever comes there has to begin with the job's token,
which is compared before anything else is read, and to end within a few seconds and kilobytes. Silent, slow and wrong
connections are closed, and nobody waits for them.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Final

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # it has no types

from lightning_gpp.errors import PeerFailure
from lightning_gpp.failure.links import PeerLink
from lightning_gpp.failure.processes import ProcessIdentity, say

_LIMIT: Final = 4096
"""Bytes of the longest introduction."""
_PATIENCE: Final = 5.0
"""Seconds for a connection to introduce itself."""
_MOST: Final = 4096
"""Connections that may introduce themselves at the same time; the oldest is closed for another one."""
_REMINDER: Final = 30.0
"""Seconds after which rank 0 says whom it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of rank 0; the token keeps out connections of other jobs and port scanners."""

    host: str
    port: int
    token: str


Exchange = Callable[[Address | None], Address]
"""Makes rank 0's address known to all; the others give None."""


class Listener:
    """The port on which rank 0 accepts the other ranks."""

    def __init__(self) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=_MOST, dualstack_ipv6=both)
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        self.address = Address(host=host, port=self._socket.getsockname()[1], token=secrets.token_hex(16))

    def accept(self, world_size: int, patience: float, come: Callable[[PeerLink], object]) -> None:
        """Call a function with the link to each other rank as soon as that has come.

        Raises:
            PeerFailure: ranks are missing after `patience` seconds.
        """
        missing, began, told = set(range(1, world_size)), time.monotonic(), False
        with self._socket, _Guests(self._socket, self.address.token, missing) as guests:
            while missing:
                for link in guests.introduced():
                    missing.remove(link.rank)
                    come(link)
                waited = time.monotonic() - began
                if missing and waited > patience:
                    raise _missing(missing, patience)
                if missing and waited > _REMINDER and not told:
                    say(f"[rank 0] Waiting for ranks {sorted(missing)}, which have not started yet.")
                    told = True


class _Stranger(Exception):  # noqa: N818
    """The other side of a connection is no rank of this job."""


@dataclass(slots=True)
class _Guest:
    """A connection that has not introduced itself yet."""

    connection: socket.socket
    until: float
    received: bytes = b""


class _Guests:
    """Connections to a port, until they have introduced themselves as one of the ranks that are missing."""

    def __init__(self, server: socket.socket, token: str, missing: set[int]) -> None:
        self._server, self._token, self._missing = server, token, missing
        self._waiting: dict[socket.socket, _Guest] = {}
        server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> _Guests:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._waiting):
            self._show_out(connection)
        self._selector.close()

    def introduced(self) -> Iterator[PeerLink]:
        """Those that introduce themselves now, or within a moment."""
        for key, _ in self._selector.select(0.1):
            if key.fileobj is self._server:
                self._let_in()
            elif (link := self._link(key.data)) is not None:
                yield link
        for guest in list(self._waiting.values()):
            if time.monotonic() > guest.until:
                self._show_out(guest.connection)

    def _let_in(self) -> None:
        with suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            if len(self._waiting) == _MOST:
                self._show_out(next(iter(self._waiting)))
            guest = _Guest(connection, time.monotonic() + _PATIENCE)
            self._waiting[connection] = guest
            self._selector.register(connection, selectors.EVENT_READ, guest)

    def _link(self, guest: _Guest) -> PeerLink | None:
        try:
            link = _read(guest, self._token)
            if link is not None:
                if link.rank not in self._missing:
                    raise _Stranger("one too many")
                guest.connection.sendall(_introduction(0, self._token))
        except (_Stranger, OSError):
            self._show_out(guest.connection)
            return None
        if link is not None:
            self._selector.unregister(guest.connection)
            del self._waiting[guest.connection]
        return link

    def _show_out(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._waiting[connection]
        connection.close()


def connect(address: Address, rank: int, patience: float) -> dict[int, PeerLink]:
    """The link of another rank to rank 0. Raises PeerFailure if rank 0 does not answer within `patience` seconds."""
    try:
        connection = socket.create_connection((address.host, address.port), timeout=patience)
        with ExitStack() as failed:
            failed.callback(connection.close)
            link = _greet(_Guest(connection, time.monotonic() + patience), rank, address.token)
            failed.pop_all()
        return {0: link}
    except (OSError, _Stranger) as error:
        raise PeerFailure(
            f"Rank {rank} cannot reach rank 0's failure monitor at {address.host}:{address.port} ({error!r}). "
            "MASTER_ADDR must be an address of rank 0's host that all hosts can reach, without a firewall in between."
        ) from error


def _greet(guest: _Guest, rank: int, token: str) -> PeerLink:
    """The link to rank 0, after both sides have introduced themselves."""
    guest.connection.sendall(_introduction(rank, token))
    link = None
    while link is None:
        guest.connection.settimeout(max(guest.until - time.monotonic(), 1e-3))
        link = _read(guest, token)
    return link


def exchange_through(group: dist.ProcessGroup | None = None) -> Exchange:
    """A function that sends rank 0's address to all, by a broadcast in `group` (default: the default process group)."""

    def exchange(address: Address | None) -> Address:
        box = [address]
        dist.broadcast_object_list(box, src=0, group=group)
        if box[0] is None:
            raise PeerFailure("Rank 0 did not publish the address of its failure monitor.")
        return box[0]

    return exchange


def exchange_through_store(store: Store) -> Exchange:
    """A function that leaves rank 0's address in a store for all, before there is a process group."""

    def exchange(address: Address | None) -> Address:
        if address is not None:
            store.set("watch", json.dumps(asdict(address)))
        try:
            return Address(**json.loads(store.get("watch")))
        except dist.DistStoreError as error:
            raise PeerFailure(
                f"Rank 0 has not started its failure monitor ({error}). Its process has ended, or has not come so far: "
                "look at its output."
            ) from error

    return exchange


def _introduction(rank: int, token: str) -> bytes:
    return token.encode() + json.dumps({"rank": rank, "process": asdict(ProcessIdentity.current())}).encode() + b"\n"


def _read(guest: _Guest, token: str) -> PeerLink | None:
    """The link to whom has introduced itself; None while it has not. Raises _Stranger."""
    try:
        chunk = guest.connection.recv(_LIMIT)
    except BlockingIOError:
        return None
    guest.received += chunk
    presented, rest = guest.received[: len(token)], guest.received[len(token) :]
    if not chunk:
        raise _Stranger("the other side has closed the connection; it may have a rank of this number already")
    if len(presented) == len(token) and not hmac.compare_digest(presented, token.encode()):
        raise _Stranger("wrong token")
    line, complete, more = rest.partition(b"\n")
    if len(line) > _LIMIT:
        raise _Stranger("no introduction")
    return _introduced(guest.connection, line, more) if complete else None


def _introduced(connection: socket.socket, line: bytes, more: bytes) -> PeerLink:
    try:
        message = json.loads(line)
        return PeerLink(connection, int(message["rank"]), ProcessIdentity(**message["process"]), unread=more)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _Stranger("no introduction") from error


def _missing(ranks: set[int], patience: float) -> PeerFailure:
    return PeerFailure(
        f"The failure monitors of ranks {sorted(ranks)} did not connect to rank 0 within {patience:.0f} s. "
        "Their processes have ended, which their own output explains, or cannot reach rank 0's host (MASTER_ADDR, "
        "firewall)."
    )
