"""Python programs that start in a moment: forks of a server that has loaded what takes seconds (tests/distributed.py).

A fork runs what a new interpreter would be given (`-c code`, `-m module`, or a script) in a session of its own. Further
processes that the program starts by running `sys.executable` are new interpreters.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from tests import distributed

ROOT = Path(__file__).parents[1]
PATH = f"{ROOT}{os.pathsep}{ROOT / 'examples'}"

distributed.preload("gpp_examples.two_tower", "lightning_gpp.cli.job", "lightning_gpp.cli.planning")


class Program:
    """A program that runs; its errors are in its output, or in a file of their own.

    Attributes:
        pid: of the process, which leads the group of all that it starts.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path | str | None = None,
        environment: Mapping[str, str] | None = None,
        errors: str | None = None,
    ) -> None:
        given = {"PYTHONPATH": PATH, **(os.environ if environment is None else environment)}
        self._output, theirs = distributed.CONTEXT.Pipe(duplex=False)
        self._process = distributed.CONTEXT.Process(
            target=_main, args=(arguments, str(cwd or os.getcwd()), given, theirs, errors)
        )
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._read = b""

    @property
    def running(self) -> bool:
        return self._process.exitcode is None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it if it runs."""
        if self.running:
            self.kill()

    def kill(self) -> None:
        """Kill it, and all that it started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()

    def lines(self, timeout: float) -> Iterator[str]:
        """The lines of the output as they come."""
        deadline = time.monotonic() + timeout
        while self._more(deadline):
            *whole, self._read = self._read.split(b"\n")
            yield from (line.decode() for line in whole)

    def outcome(self, timeout: float) -> tuple[int, str]:
        """The exit code, or the negative number of the signal that ended it, and the output that is left.

        The output ends with the last process that holds it.
        """
        deadline = time.monotonic() + timeout
        try:
            while self._more(deadline):
                pass
        finally:
            self.kill()
            self._output.close()
        assert self._process.exitcode is not None
        return self._process.exitcode, self._read.decode()

    def abandoned(self, timeout: float) -> int:
        """Read nothing, as `head` does when it has enough; the exit code."""
        self._output.close()
        self._process.join(timeout)
        self.kill()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def _more(self, deadline: float) -> bool:
        """Read some output; False at its end."""
        if not select.select([self._output], [], [], max(deadline - time.monotonic(), 0))[0]:
            raise TimeoutError(f"the program has not ended; so far it printed: {self._read.decode()}")
        part = os.read(self._output.fileno(), 1 << 16)
        self._read += part
        return bool(part)


def run(
    *arguments: str, cwd: Path | str, timeout: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; with the processes that it started, it is killed after `timeout` seconds."""
    with tempfile.NamedTemporaryFile() as errors:
        code, output = Program(*arguments, cwd=cwd, environment=environment, errors=errors.name).outcome(timeout)
        return subprocess.CompletedProcess(arguments, code, output, errors.read().decode())


def run_ranks(
    number: int, *arguments: str, cwd: Path | str, timeout: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program in so many processes of one job, as torchrun does; one exit code, and what all of them printed."""
    given = {**(os.environ if environment is None else environment), **_job(number)}
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.NamedTemporaryFile()) for _ in range(number)]
        programs = []
        for rank, file in enumerate(errors):
            of_rank = {**given, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            programs.append(Program(*arguments, cwd=cwd, environment=of_rank, errors=file.name))
            stack.callback(programs[-1].end)
        codes, outputs = zip(*(program.outcome(timeout) for program in programs), strict=True)
        told = "".join(file.read().decode() for file in errors)
        return subprocess.CompletedProcess(arguments, max(codes, key=abs), "".join(outputs), told)


def _job(number: int) -> dict[str, str]:
    """What torchrun tells all processes of a job on one node."""
    counts = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "NODE_RANK": "0", "GROUP_RANK": "0"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(distributed.free_port())}
    return {**counts, **meeting, "TORCHELASTIC_RUN_ID": "test"}


def _main(
    arguments: tuple[str, ...], folder: str, environment: dict[str, str], output: Connection, errors: str | None
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND) if errors else 1, 2)
    output.close()
    code = _ended(arguments)
    # Python would also take everything apart that the forks share, which copies all of its memory.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ended(arguments: tuple[str, ...]) -> int:
    """Run the program; returns its exit code."""
    try:
        _interpret(*arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _interpret(first: str, *others: str) -> None:
    """Do what an interpreter with these arguments does."""
    if first == "-m":
        sys.argv[:] = others
        sys.path.insert(0, os.getcwd())
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv[:] = ["-c", *others[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(others[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = [first, *others]
        sys.path.insert(0, str(Path(first).parent))
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        main.__file__ = first
        exec(compile(Path(first).read_text(), first, "exec"), main.__dict__)
