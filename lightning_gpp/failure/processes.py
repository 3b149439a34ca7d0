"""Operating-system processes of a job: identity, kind of end, and ways to end them."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_STATE, _START_TIME, _EXIT_STATUS = 0, 19, 49
"""Positions in /proc/PID/stat, counted after the command (proc(5): fields 3, 22 and 52)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process, identified so that other processes recognise it.

    `machine` is equal for two processes only if they may send each other signals by `pid`: same boot of the same kernel
    and same pid namespace. `started` (clock ticks since boot) distinguishes a process from a later one with the same
    number.
    """

    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> ProcessIdentity:
        pid = os.getpid()
        fields = _stat(pid)
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=pid,
            started=int(fields[_START_TIME]) if fields else 0,
        )

    @property
    def is_here(self) -> bool:
        """True if its pid is valid in this process."""
        return self.machine == _machine()

    def state(self) -> str:
        """The state as in proc(5): `R`, `S`, `T` (stopped) ...; `Z` or "" after its end, `?` if unknown here."""
        if not self.is_here:
            return "?"
        fields = self._stat()
        return fields[_STATE] if fields else ("" if sys.platform == "linux" or not _exists(self.pid) else "?")

    def ending(self, patience: float = 0.3) -> str:
        """The way it ended, as far as known here: a verb phrase. Waits up to `patience` seconds for the end."""
        deadline = time.monotonic() + patience
        while self.state() not in ("", "Z", "?") and time.monotonic() < deadline:
            time.sleep(0.01)
        fields = self._stat() if self.is_here else []
        if fields and fields[_STATE] == "Z":
            return _ending(int(fields[_EXIT_STATUS]))
        return "was killed or exited without finishing"

    def kill(self) -> bool:
        """Send SIGKILL if the process is on this machine and still exists. Returns True if a signal was sent."""
        if self.state() in ("", "Z", "?"):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
            return True
        return False

    def _stat(self) -> list[str]:
        fields = _stat(self.pid)
        return fields if fields and int(fields[_START_TIME]) == self.started else []


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with code {os.WEXITSTATUS(status)} without finishing"


def bind_to_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process as soon as its parent ends (on Linux; elsewhere nothing happens).

    For processes that a launcher starts and would leave behind. `parent` is the expected parent's pid: if that process
    has ended already, this one ends here. The kernel's signal is SIGKILL, which leaves no time for a message: call
    `release_from_parent` once a `FailureMonitor` runs, which notices the same and reports it.
    """
    _set_parent_death_signal(signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def release_from_parent() -> None:
    """Undo `bind_to_parent`."""
    _set_parent_death_signal(0)


def _set_parent_death_signal(number: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


class Forgetful(Protocol):
    """An owner of sockets that a forked worker must not keep."""

    def forget(self) -> None:
        """Close them in this process."""
        ...


_forgetful: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def forget_in_workers(owner: Forgetful) -> None:
    """Let `owner` forget its sockets in every worker that is forked from now on, as long as it lives."""
    _forgetful.add(owner)


def _forget() -> None:
    for owner in list(_forgetful):
        owner.forget()


os.register_at_fork(after_in_child=_forget)


def show_crashes() -> None:
    """Let this process print the Python stacks of its threads if native code crashes (`SIGSEGV`, `SIGABRT`)."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # an error stream without a file: notebooks
            faulthandler.enable()


def say(text: str) -> None:
    """Write to stderr and the log, immediately and in one piece, but wait at most a second for it."""

    def write() -> None:
        _print(text)
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


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
