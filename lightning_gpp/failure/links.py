"""Connections between the ranks' failure monitors: a star of TCP sockets around rank 0 that carries lines of JSON.

Sockets reveal more, and sooner, than keys in a store: the kernel closes a socket as soon as its process ends, for any
reason, and the other side notices without polling. Only a stopped process keeps its socket open, which heartbeats
reveal. The star costs rank 0 one small message per rank and tick, and every other rank one per tick.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any, Final

from lightning_gpp.failure.processes import ProcessIdentity
from lightning_gpp.failure.stuck import Standstill

PeerMessage = dict[str, Any]

_CHUNK: Final = 1 << 16
_BACKLOG_LIMIT: Final = 1 << 20
"""Bytes to keep for a peer that does not read. A peer with more must be stopped, and needs no heartbeats."""


class PeerLink:
    """One connection to the monitor of another rank: complete messages over a socket that never blocks."""

    def __init__(self, connection: socket.socket, rank: int, process: ProcessIdentity, unread: bytes = b"") -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.socket = connection
        self.rank = rank
        self.process = process
        self.heard = time.monotonic()
        """Time of the last message of the peer."""
        self.action = ""
        """The last activity that the peer reported."""
        self.place: Standstill | None = None
        """The place where the peer waits without a move, by its last word; None if it may go on."""
        self.done = False
        """True after the peer said that it has finished and may close the connection."""
        self._unsent = b""
        self._unread = unread

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
        while (chunk := self._read()) and len(self._unread) < _BACKLOG_LIMIT:
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


def _encode(message: PeerMessage) -> bytes:
    return json.dumps(message).encode() + b"\n"
