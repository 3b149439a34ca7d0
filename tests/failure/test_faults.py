"""Whatever happens to a rank: all ranks end soon, with a non-zero exit code, and say what happened to whom."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.failure.pipeline_rank import STEP_OF_FAULT, Rank, job

WORLD_SIZE = 3
TIMEOUT = 2.0


def raise_error() -> None:
    raise ValueError("the injected fault")


FAULTS = {
    "raise": raise_error,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(0),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "abort": os.abort,
}
SAID = {
    "raise": r"raised ValueError: the injected fault",
    "kill": r"was killed",
    "stop": r"stopped answering [\d.]+ s ago",
    "exit": r"(exited with code 0|was killed or exited) without finishing",
    "sys.exit": r"raised SystemExit: 0",
    "terminate": r"was killed",
    "abort": r"was killed",
}
SHOWN = {"abort": "Fatal Python error: Aborted"}
"""What the rank itself prints: the stacks of a crash in native code."""
BOUND = {"stop": 2 * TIMEOUT + 3.0}
"""Seconds from the fault to the end of the last process; a quiet machine needs about TIMEOUT + 0.4 and 0.3."""


def failing(at: int, fault: str, rank: Rank) -> None:
    while True:
        if rank.step == STEP_OF_FAULT and rank.rank == at:
            print(f"fault at {time.monotonic()}", flush=True)
            FAULTS[fault]()
        rank.exchange()


@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        pytest.param(fault, rank, marks=() if rank == number % WORLD_SIZE else pytest.mark.acceptance)
        for number, fault in enumerate(FAULTS)
        for rank in range(WORLD_SIZE)
    ],
)
def test_a_fault_ends_all_ranks(tmp_path: Path, fault: str, rank: int) -> None:
    with job(tmp_path, functools.partial(failing, rank, fault), WORLD_SIZE, TIMEOUT) as running:
        running.wait(40, stopped=rank if fault == "stop" else None)
    ended = time.monotonic()
    began = float(running.output(rank).partition("fault at ")[2].split()[0])
    assert ended - began < BOUND.get(fault, 4.0)
    survivors = [other for other in range(WORLD_SIZE) if other != rank]
    for other in survivors:
        assert running.codes[other] == 1, running.output()
        assert _named(running.output(other), rank, running.pids[rank], SAID[fault]), running.output()
    assert fault != "stop" or "(it is stopped)" in running.output()
    assert fault == "stop" or (running.codes[rank] == 0) == (fault == "exit")
    assert SHOWN.get(fault, "") in running.output(rank)


def _named(output: str, rank: int, pid: int, said: str) -> bool:
    return bool(re.search(rf"First cause: rank {rank} \(host \S+, pid {pid}, [^)]*step \d+[^)]*\) {said}", output))
