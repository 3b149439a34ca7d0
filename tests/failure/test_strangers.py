"""Junk at every port that the processes of a run listen at, from its first moment to its last, changes nothing."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.failure import faulty
from tests.failure.faulty import WORLD_SIZE
from tests.failure.pipeline_rank import CONTEXT, free_port
from tests.failure.test_monitor import JUNK
from tests.failure.test_random_faults import told, undisturbed

LISTENS = "0A"
"""The state of a socket in /proc/net/tcp."""
MOST = 18
"""Connections to one port, which stay open."""
PAUSE = 0.2
"""Seconds between two searches for ports, which take processor time from the run."""


def listening() -> dict[str, int]:
    """Ports of this machine by the inode of their socket."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[9]: int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == LISTENS}


def ports_of(session: int) -> set[int]:
    """Ports at which processes of a session listen."""
    inodes, ports = listening(), set()
    for link in sockets_of(session):
        with contextlib.suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            if found and found[1] in inodes:
                ports.add(inodes[found[1]])
    return ports


def sockets_of(session: int) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(process.name)) == session:
                yield from (process / "fd").iterdir()


def throw(port: int, junk: bytes) -> socket.socket | None:
    """A connection that has sent junk; None if nobody listens any more."""
    connection = socket.socket()
    connection.settimeout(0.2)
    try:
        connection.connect(("127.0.0.1", port))
        connection.sendall(junk)
    except OSError:
        connection.close()
        return None
    return connection


@pytest.mark.timeout(200)
def test_junk_at_every_port_changes_nothing(tmp_path: Path) -> None:
    output, expected = tmp_path / "output.txt", undisturbed()
    process = CONTEXT.Process(target=faulty.under_torchrun, args=(str(tmp_path), None, str(output), free_port()))
    process.start()
    hit: Counter[int] = Counter()
    with contextlib.ExitStack() as open_ones:
        while process.is_alive():
            for port in ports_of(process.pid or 0):
                for junk in JUNK.values() if hit[port] < MOST else ():
                    if (connection := throw(port, junk)) is not None:
                        open_ones.enter_context(connection)
                        hit[port] += 1
            time.sleep(PAUSE)
    assert process.exitcode == 0, output.read_text()
    assert told(output.read_text()) == expected
    assert len(hit) > WORLD_SIZE, hit
