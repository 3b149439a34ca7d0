"""Operating-system processes of a job: which one a rank is, how it ended, and how this one ends."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_STATE, _START_TIME, _EXIT_STATUS = 0, 19, 49
"""Positions in /proc/PID/stat, counted after the command (proc(5): fields 3, 22 and 52)."""
ENDED: Final = ("", "Z")
"""States of a process that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process, identified so that other processes recognise it.

    `machine` is equal for two processes only if they see each other by `pid`: same boot of the same kernel and same pid
    namespace. `started` (clock ticks since boot) distinguishes a process from a later one with the same number.
    """

    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> ProcessIdentity:
        pid = os.getpid()
        fields = _stat(pid)
        started = int(fields[_START_TIME]) if fields else 0
        return cls(host=socket.gethostname(), machine=_machine(), pid=pid, started=started)

    def state(self) -> str:
        """The state as in proc(5): `R`, `S`, `T` (stopped) ...; `Z` or "" after its end, `?` if unknown here."""
        if self.machine != _machine() or not self.started:
            return "?"
        fields = self._stat()
        return fields[_STATE] if fields else ""

    def ending(self, patience: float = 0.3) -> str:
        """The way it ended, as far as known here: a verb phrase. Waits up to `patience` seconds for the end."""
        deadline = time.monotonic() + patience
        while self.state() not in (*ENDED, "?") and time.monotonic() < deadline:
            time.sleep(0.01)
        fields = self._stat() if self.machine == _machine() else []
        if fields and fields[_STATE] == "Z":
            return _ending(int(fields[_EXIT_STATUS]))
        return "was killed or exited without finishing"

    def _stat(self) -> list[str]:
        fields = _stat(self.pid)
        return fields if fields and int(fields[_START_TIME]) == self.started else []


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@cache
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with code {os.WEXITSTATUS(status)} without finishing"


def show_crashes() -> None:
    """Let this process print the Python stacks of its threads if native code crashes (`SIGSEGV`, `SIGABRT`)."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # an error stream without a file: notebooks
            faulthandler.enable()


def say(text: str) -> None:
    """Write to stderr and the log, immediately and in one piece, but wait at most a second for it."""

    def write() -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        log.info(text)

    bounded(write)


def exit_now(code: int) -> None:
    """End this process from any thread, whatever the main thread is doing; its worker processes end first."""
    try:
        bounded(_flush)
        for child in multiprocessing.active_children():
            child.kill()
    finally:
        os._exit(code)


def bounded(function: Callable[[], None], seconds: float = 1.0) -> None:
    """Run `function` and wait at most `seconds` for it: a full pipe must not keep a process from ending.

    A process that has no memory for a thread waits to the end.
    """
    thread = threading.Thread(target=function, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        function()
    else:
        thread.join(seconds)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
