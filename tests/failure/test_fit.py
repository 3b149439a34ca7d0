"""Faults while Lightning trains and validates through the strategy, on each rank and in each phase."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.failure import fit_script
from tests.failure.fit_script import FAILURE_TIMEOUT
from tests.failure.pipeline_rank import free_port, processes_running

WORLD_SIZE = 3

SAID = {
    "raise": r"raised ValueError: the injected fault",
    "kill": r"was killed",
    "stop": r"stopped answering [\d.]+ s ago",
    "exit": r"(exited with code 0|was killed or exited) without finishing",
}
BOUND = {"stop": FAILURE_TIMEOUT / 5 + 5.0}
"""Seconds from the fault to the end of the last process."""


def fit_as_torchrun_would(rank: int, world_size: int, port: int, folder: str, environment: dict[str, str]) -> None:
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test", **environment)
    fit_script.fit(folder, world_size, CALLBACKS[environment.get("CALLBACK", "")](folder))


CALLBACKS = {
    "": lambda folder: [],
    "save": lambda folder: [OnExceptionCheckpoint(folder)],
}


def fault(kind: str, rank: int, phase: str) -> dict[str, str]:
    return {"FAULT": kind, "FAULT_RANK": str(rank), "FAULT_PHASE": phase}


@pytest.mark.parametrize(
    ("kind", "rank", "phase"), [("raise", 2, "steady"), ("kill", 0, "warm-up"), ("stop", 1, "validation")]
)
def test_a_fault_ends_all_ranks(tmp_path: Path, kind: str, rank: int, phase: str) -> None:
    check_that_all_end(tmp_path, kind, rank, phase)


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("kind", "rank", "phase"), [("raise", 0, "warm-up"), ("kill", 2, "steady"), ("stop", 1, "drain")]
)
def test_a_fault_without_a_flush(tmp_path: Path, kind: str, rank: int, phase: str) -> None:
    """In the fill, the steady state, and the drain of a pipeline that is several mini-batches ahead."""
    check_that_all_end(tmp_path, kind, rank, phase, WEIGHTS="stash")


def check_that_all_end(tmp_path: Path, kind: str, rank: int, phase: str, **environment: str) -> None:
    arguments = (str(tmp_path), fault(kind, rank, phase) | environment)
    with processes_running(tmp_path, WORLD_SIZE, fit_as_torchrun_would, *arguments) as running:
        running.wait(50, stopped=rank if kind == "stop" else None)
    assert time.monotonic() - began(running.output(rank)) < BOUND.get(kind, 5.0)
    codes = [code for number, code in enumerate(running.codes) if number != rank or kind != "exit"]
    assert all(codes), running.codes  # a rank that exits with 0 has that code
    for other in range(WORLD_SIZE):
        assert other == rank or names(running.output(other), rank, kind), running.output()
        assert kind != "raise" or re.search(r"doing: stage '\w+', action \d+[FB]", running.output(other))


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.acceptance)])
def test_a_checkpoint_on_exception_does_not_wait_for_other_ranks(tmp_path: Path, rank: int) -> None:
    arguments = (str(tmp_path), fault("raise", rank, "steady") | {"CALLBACK": "save"})
    with processes_running(tmp_path, WORLD_SIZE, fit_as_torchrun_would, *arguments) as running:
        running.wait(50)
    assert time.monotonic() - began(running.output(rank)) < 5.0
    assert all(running.codes), running.codes
    assert names(running.output(1), rank, "raise")
    assert not list(tmp_path.rglob("*.ckpt"))


LAUNCHERS = {
    "lightning": (),
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"),
}


@pytest.mark.timeout(150)  # fresh processes import Lightning: 12 s each on an idle machine, more on a busy one
@pytest.mark.parametrize(
    ("launcher", "kind", "rank", "phase"),
    [
        ("lightning", "kill", 0, "steady"),
        pytest.param("lightning", "stop", 1, "validation", marks=pytest.mark.acceptance),
        pytest.param("lightning", "exit", 1, "warm-up", marks=pytest.mark.acceptance),
        pytest.param("torchrun", "raise", 1, "steady", marks=pytest.mark.acceptance),
        pytest.param("torchrun", "kill", 1, "steady", marks=pytest.mark.acceptance),
    ],
)
def test_launchers_leave_nothing_behind(tmp_path: Path, launcher: str, kind: str, rank: int, phase: str) -> None:
    output = tmp_path / "output.txt"
    with launched(launcher, output, fault(kind, rank, phase)) as process:
        code = process.wait(120)
        left = still_there(output.read_text(), patience=6.0)
        text = output.read_text()  # the other rank may write its message after the end of the first
    assert time.monotonic() - began(text) < BOUND.get(kind, 5.0) + 5.0
    assert code != 0
    assert names(text, rank, kind), text
    assert len(pids(text)) == 2
    assert not left  # also no process that is stopped: rank 0 or torchrun has started it
    if launcher == "torchrun" and kind != "stop":  # a stopped process ends last, when torchrun has its summary
        assert re.search(rf"Root Cause.*?rank +: {rank} ", text, re.DOTALL), text
    if kind == "raise":
        assert "ValueError: the injected fault" in text.partition("Root Cause")[2], text


@contextlib.contextmanager
def launched(launcher: str, output: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The script under a launcher; whatever is left of it at the end is killed."""
    port = str(free_port())
    more = [f"--master-port={port}"] if launcher == "torchrun" else []
    command = [sys.executable, *LAUNCHERS[launcher], *more, fit_script.__file__]
    variables = {**os.environ, "MASTER_PORT": port, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    with output.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=output.parent, env=variables)
    try:
        yield process
    finally:
        for pid in {process.pid, *pids(output.read_text())}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def pids(output: str) -> set[int]:
    return {int(pid) for pid in re.findall(r"pid (\d+) rank \d", output)}


def still_there(output: str, patience: float) -> set[int]:
    """Processes of the ranks that have not ended after `patience` seconds."""
    deadline = time.monotonic() + patience
    while (left := {pid for pid in pids(output) if is_running(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def began(output: str) -> float:
    return float(output.partition("fault at ")[2].split()[0])


def names(output: str, rank: int, kind: str) -> bool:
    """Its activity is told only if its first heartbeat has arrived before the fault."""
    return bool(re.search(rf"First cause: rank {rank} \(host \S+, pid \d+(, .*)?\) {SAID[kind]}", output))
