"""One rank of a small pipeline of point-to-point exchanges, with a fault in it; and the job of such ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_gpp.failure.hangs import Activity
from lightning_gpp.failure.limits import Limits
from lightning_gpp.failure.monitor import FailureMonitor
from tests import distributed

CONTEXT = multiprocessing.get_context("forkserver")
"""One server for all tests: whatever any of them needs and is slow to import."""
distributed.preload("lightning_gpp.strategy", "lightning_gpp.failure.monitor")

STEP_OF_FAULT = 50
Body = Callable[["Rank"], None]


@dataclass
class Rank:
    """What a body of a test knows."""

    rank: int
    world_size: int
    monitor: FailureMonitor
    step: int = 0

    def exchange(self) -> None:
        """One step: forward through the chain of ranks, and back."""
        self.step += 1
        tensor = torch.zeros(64)
        before, after = self.rank - 1, self.rank + 1
        for source, target in ((before, after), (after, before)):
            if 0 <= source < self.world_size:
                dist.recv(tensor, source)
            if 0 <= target < self.world_size:
                dist.send(tensor, target)
        time.sleep(0.01)


def main(rank: int, world_size: int, port: int, folder: Path, target: Callable[..., None], *arguments: Any) -> None:
    output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    target(rank, world_size, port, *arguments)


def run_body(rank: int, world_size: int, port: int, timeout: float | None, body: Body) -> None:
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    state: list[Rank] = []
    monitor = FailureMonitor(
        rank=rank,
        world_size=world_size,
        limits=Limits(silence=timeout or 0.0),
        activity=Activity(describe=lambda: f"step {state[0].step}" if state else "start"),
    )
    with monitor:
        state.append(Rank(rank, world_size, monitor))
        body(state[0])
    dist.destroy_process_group()


@dataclass
class Job:
    """The processes of a test; `wait` is over when they all are."""

    processes: list[BaseProcess]
    folder: Path
    started: float = field(default_factory=time.monotonic)

    def wait(self, seconds: float, *, stopped: int | None = None) -> float:
        """Seconds until the last process ended, but for one that is stopped, which is the launcher's to end.

        Fails if one is still there after `seconds`.
        """
        awaited = [(rank, process) for rank, process in enumerate(self.processes) if rank != stopped]
        for _, process in awaited:
            process.join(max(self.started + seconds - time.monotonic(), 0))
        left = [rank for rank, process in awaited if process.is_alive()]
        if left:
            raise AssertionError(f"ranks {left} are still there after {seconds} s: {self.output()}")
        return time.monotonic() - self.started

    @property
    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def output(self, *ranks: int) -> str:
        chosen = ranks or range(len(self.processes))
        return "\n".join((self.folder / f"rank{rank}.txt").read_text() for rank in chosen)

    def wait_for(self, text: str, seconds: float = 20) -> None:
        """Wait until every rank has printed `text`."""
        deadline = time.monotonic() + seconds
        while any(text not in self.output(rank) for rank in range(len(self.processes))):
            if time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} from every rank after {seconds} s: {self.output()}")
            time.sleep(0.02)


def job(
    folder: Path, body: Body, world_size: int = 3, timeout: float | None = 2.0
) -> contextlib.AbstractContextManager[Job]:
    """Ranks of a process group that run `body` under a failure monitor."""
    return processes_running(folder, world_size, run_body, timeout, body)


@contextlib.contextmanager
def processes_running(folder: Path, world_size: int, target: Callable[..., None], *more: Any) -> Iterator[Job]:
    """Processes that run `target(rank, world_size, port, *more)`; their output goes to files. None is left behind."""
    for rank in range(world_size):
        (folder / f"rank{rank}.txt").touch()
    arguments = (world_size, free_port(), folder, target, *more)
    processes = [CONTEXT.Process(target=main, args=(rank, *arguments), daemon=True) for rank in range(world_size)]
    for process in processes:
        process.start()
    try:
        yield Job(list(processes), folder)
    finally:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGKILL)
            process.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
