"""Starts commands in a moment: as forks of one process that has loaded what takes seconds to load.

A fork runs a command as `python -m lightning_gpp.cli.<name>` does, in a session of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

SERVER = """
import atexit, gc, json, os, runpy, socket, sys, threading
import gpp_examples.two_tower, lightning_gpp.cli.job, lightning_gpp.cli.planning  # take seconds: loaded once

def run(name):
    # Python would also take everything apart that the forks share, which copies all of its memory
    try:
        runpy.run_module(f"lightning_gpp.cli.{name}", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

gc.collect()
gc.freeze()
requests = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, streams, _, _ = socket.recv_fds(requests, 1 << 20, 2)
    if not message:
        break
    name, arguments, folder, environment = json.loads(message)
    process = os.fork()
    if not process:
        requests.close()
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for number, stream in zip((1, 2), streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.argv[:] = [name, *arguments]
        sys.path[0] = folder  # as -m does
        run(name)
    for stream in streams:
        os.close(stream)
    requests.send(json.dumps(process).encode())
    requests.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
"""


class CommandServer:
    """Owns the process that forks commands; it ends with the process that has started it."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(theirs.fileno())],
                env={"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", **os.environ},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def run(
        self, name: str, *arguments: str, cwd: Path, timeout: float, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; with the processes that it started, it is killed after `timeout` seconds."""
        environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", **os.environ, **environment}
        request = json.dumps((name, arguments, str(cwd), environment)).encode()
        with tempfile.TemporaryFile() as errors:
            reader, writer = os.pipe()
            with open(reader, "rb", buffering=0) as output:
                socket.send_fds(self._requests, [request], [writer, errors.fileno()])
                os.close(writer)
                process = self._answer()
                try:
                    printed = _read(output.fileno(), time.monotonic() + timeout)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process, signal.SIGKILL)  # with the processes that it started
                    code = self._answer()
            errors.seek(0)
            return subprocess.CompletedProcess([name, *arguments], code, printed, errors.read().decode())

    def close(self) -> None:
        """The server ends when nobody can ask it any more."""
        self._requests.close()
        self._process.wait()

    def _answer(self) -> int:
        message = self._requests.recv(1 << 10)
        assert message, "the process that forks commands has ended"
        return int(json.loads(message))


def _read(stream: int, deadline: float) -> str:
    """What is written until all writers have closed the stream."""
    parts = []
    while select.select([stream], [], [], max(deadline - time.monotonic(), 0))[0]:
        part = os.read(stream, 1 << 16)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)
    raise TimeoutError(f"the command has not ended; so far it printed: {b''.join(parts).decode()}")


@cache
def command_server() -> CommandServer:
    """The one of this process."""
    server = CommandServer()
    atexit.register(server.close)
    return server
