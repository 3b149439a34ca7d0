"""Real processes with a real process group for tests.

Processes are forked from a server that has imported torch once, so that a test with four of them starts in a moment.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
_preloaded = [
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "torch.distributed.tensor.experimental",
    "torch.utils.serialization",
    "sympy.tensor.tensor",
    "pydantic.dataclasses",
    "hypothesis.strategies",
    "pytest",
    "lightning_gpp.capture",
    "lightning_gpp.runtime",
]
"""Whatever tests import in their processes and is slow to import; the second is what the first backward imports, the
third what the first step of an optimizer does."""


def preload(*modules: str) -> None:
    """Let the server import these, too, before it forks."""
    _preloaded[:] = dict.fromkeys([*_preloaded, *modules])
    CONTEXT.set_forkserver_preload([*_preloaded, "tests.frozen"])


preload()
PATIENCE = 240.0
"""Seconds after which processes count as hanging, however busy the machine is."""
_GRACE = 2.0
"""Seconds that the other ranks get to report after the first failure."""


def run_distributed(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = PATIENCE) -> list[Any]:
    """Run `fn(rank, *args)` in `world_size` processes of one gloo group; return what they returned, by rank.

    `fn` is a function of a module; arguments and results are pickled. Raises AssertionError with the traceback of the
    ranks that failed, or with the stacks of those that hang after `timeout` seconds. No process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
        payload = pickle.dumps((fn, args))
        processes = [
            CONTEXT.Process(target=_main, args=(rank, world_size, folder, timeout, sender, payload), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        try:
            reports = _collect([receiver for receiver, _ in pipes], timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return _results(reports, Path(folder))


def run_each(world_size: int, fn: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Run `fn(rank, *case)` for every case in the same processes; for each case what they returned, by rank."""
    by_rank = run_distributed(world_size, each, fn, cases, timeout=patience(cases))
    return [list(found) for found in zip(*by_rank, strict=True)]


def patience(cases: Sequence[Any]) -> float:
    return PATIENCE + 30.0 * len(cases)


def each(rank: int, fn: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[Any]:
    return [fn(rank, *case) for case in cases]


def free_port() -> int:
    """A port of this machine that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Report = tuple[bool, Any]
"""(succeeded, result or traceback)."""


def _collect(receivers: list[Connection], timeout: float) -> list[Report | None]:
    reports: list[Report | None] = [None] * len(receivers)
    deadline = time.monotonic() + timeout
    waiting = dict(zip(receivers, range(len(receivers)), strict=True))
    while waiting and time.monotonic() < deadline:
        for ready in wait(list(waiting), deadline - time.monotonic()):
            rank = waiting.pop(ready)
            reports[rank] = report = _report(ready)
            if not report[0]:
                deadline = min(deadline, time.monotonic() + _GRACE)
    return reports


def _report(receiver: Connection) -> Report:
    try:
        succeeded, content = receiver.recv()
        return succeeded, pickle.loads(content) if succeeded else content
    except EOFError:
        return False, "The process ended without a report."


def _results(reports: list[Report | None], folder: Path) -> list[Any]:
    failures = [f"rank {rank}:\n{report[1]}" for rank, report in enumerate(reports) if report and not report[0]]
    hanging = [
        f"rank {rank} did not end:\n{(folder / f'stacks{rank}').read_text()}"
        for rank, report in enumerate(reports)
        if report is None
    ]
    if failures or hanging:
        raise AssertionError("\n".join([*failures, *hanging]))
    return [report[1] for report in reports if report]


def _main(rank: int, world_size: int, folder: str, timeout: float, sender: Connection, payload: bytes) -> None:
    torch.set_num_threads(1)
    with open(f"{folder}/stacks{rank}", "w") as stacks:
        faulthandler.dump_traceback_later(max(timeout - 2, timeout / 2), file=stacks)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            fn, args = pickle.loads(payload)
            result = pickle.dumps(fn(rank, *args))
            dist.barrier()
            sender.send((True, result))
        except BaseException:
            sender.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
