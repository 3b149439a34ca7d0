"""Random faults of a run: kinds x moments x ranks. None hangs, no process remains, all ranks name the first cause, and
the last checkpoint resumes to the same values.

GPP_FAULTS=100:200 makes the acceptance run take these seeds only, so that it can be done in parts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.failure import program
from tests.failure.pipeline_rank import free_port, processes_running
from tests.failure.program import BATCHES, MICRO_BATCHES, as_torchrun_would

WORLD_SIZE = 3
FAILURE_TIMEOUT = 12.0
"""Seconds. A stopped rank counts as stopped after a fifth of it."""
STEADY = 10
"""The mini-batch of training in whose forward or backward a fault happens, right after a checkpoint."""
SEEDS = range(*map(int, os.environ.get("GPP_FAULTS", "0:300").split(":")))
ENDED = "(exited with code {code}|was killed or exited) without finishing"
SAID = {
    "raise": r"raised ValueError: the injected fault",
    "memory": r"raised RuntimeError: .*(memory|allocate)",
    "kill": r"was killed",
    "stop": r"stopped answering [\d.]+ s ago",
    "exit 0": ENDED.format(code=0),
    "exit 1": ENDED.format(code=1),
    "interrupt": r"was interrupted",
}
MOMENTS = (
    *("set-up", "forward 1", f"forward {STEADY * MICRO_BATCHES + 2}", f"backward {STEADY * MICRO_BATCHES + 2}"),
    *("validating", f"saving {STEADY}", "end"),
)
BOUND = {"stop": FAILURE_TIMEOUT / 5 + 5.0}
"""Seconds from the fault to the end of the last process."""


@dataclass(frozen=True)
class Trial:
    """A fault."""

    kind: str
    moment: str
    rank: int

    @classmethod
    def random(cls, seed: int) -> Trial:
        chance = random.Random(seed)
        return cls(chance.choice(list(SAID)), chance.choice(MOMENTS), chance.randrange(WORLD_SIZE))


SAMPLE = [
    Trial("raise", MOMENTS[2], 2),
    Trial("stop", "validating", 1),
    Trial("exit 0", f"saving {STEADY}", 1),
]
"""Faults that every run of the tests tries."""


def start(folder: Path, trial: Trial | None, **strategy: Any) -> Any:
    saving = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1, save_last=True)
    more = {
        "strategy": {"failure_timeout": FAILURE_TIMEOUT, **strategy},
        "callbacks": (saving,),
        "val_check_interval": None,
        "num_sanity_val_steps": 0,
    }
    fault = (trial.rank, trial.kind, trial.moment) if trial else ()
    return processes_running(folder, WORLD_SIZE, as_torchrun_would, str(folder), fault, more)


def told(folder: Path) -> list[str]:
    """The values of a run to its end, from the newest checkpoint."""
    with start(folder, None) as running:
        before = len(running.output(0))
        running.wait(60)
    assert running.codes == [0] * WORLD_SIZE, running.output()
    return re.findall("^(?:trained|validated) .*$", running.output(0)[before:], re.MULTILINE)


@functools.cache
def undisturbed() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        return told(Path(folder))


def check(folder: Path, trial: Trial, **strategy: Any) -> None:
    with start(folder, trial, **strategy) as running:
        running.wait(60, stopped=trial.rank if trial.kind == "stop" else None)
    assert time.monotonic() - began(running.output(trial.rank)) < BOUND.get(trial.kind, 5.0), running.output()
    codes = [code for rank, code in enumerate(running.codes) if rank != trial.rank or trial.kind != "exit 0"]
    assert all(codes), running.output()  # a rank that exits with 0 has that code
    for rank in {*range(WORLD_SIZE)} - {trial.rank}:
        assert names(running.output(rank), trial), running.output()
    if trial.moment.startswith("saving") and trial.kind == "raise":
        assert "doing: collecting the state for a checkpoint" in running.output()


@pytest.mark.parametrize(
    "trial", [*SAMPLE, *(pytest.param(Trial.random(seed), marks=pytest.mark.acceptance) for seed in SEEDS)], ids=str
)
@pytest.mark.timeout(300)
def test_a_fault_ends_all_ranks_and_the_run_goes_on(tmp_path: Path, trial: Trial) -> None:
    check(tmp_path, trial)
    values = told(tmp_path)
    assert undisturbed()[len(undisturbed()) - len(values) :] == values


@pytest.mark.acceptance
@pytest.mark.parametrize("trial", [Trial("raise", "forward 1", 0), Trial("kill", MOMENTS[2], 2)], ids=str)
def test_a_fault_without_a_flush(tmp_path: Path, trial: Trial) -> None:
    check(tmp_path, trial, weights="stash")


@pytest.mark.acceptance
def test_a_fault_in_the_drain(tmp_path: Path) -> None:
    check(tmp_path, Trial("stop", f"backward {BATCHES * MICRO_BATCHES}", 1), weights="stash")


def test_a_checkpoint_on_exception_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    trial = Trial("raise", MOMENTS[2], 0)
    more = {"callbacks": (OnExceptionCheckpoint(tmp_path),)}
    fault = (trial.rank, trial.kind, trial.moment)
    with processes_running(tmp_path, WORLD_SIZE, as_torchrun_would, str(tmp_path), fault, more) as running:
        running.wait(50)
    assert time.monotonic() - began(running.output(0)) < 5.0
    assert all(running.codes), running.codes
    assert names(running.output(1), trial)
    assert not list(tmp_path.rglob("*.ckpt"))


LAUNCHERS = {
    "lightning": (),
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"),
}


@pytest.mark.acceptance
@pytest.mark.timeout(250)  # fresh processes import Lightning: 12 s each on an idle machine, more on a busy one
@pytest.mark.parametrize(
    ("launcher", "trial"),
    [
        ("lightning", Trial("kill", "forward 10", 0)),
        ("lightning", Trial("stop", "validating", 1)),
        ("lightning", Trial("exit 0", "forward 1", 1)),
        ("torchrun", Trial("raise", "forward 10", 1)),
        ("torchrun", Trial("kill", "forward 10", 1)),
    ],
    ids=str,
)
def test_launchers_leave_nothing_behind(tmp_path: Path, launcher: str, trial: Trial) -> None:
    output = tmp_path / "output.txt"
    with launched(launcher, output, trial) as process:
        code = process.wait(200)
        left = still_there(output.read_text(), patience=6.0)
        text = output.read_text()  # the other rank may write its message after the end of the first
    assert time.monotonic() - began(text) < BOUND.get(trial.kind, 5.0) + 5.0
    assert code != 0
    assert names(text, trial), text
    assert len(pids(text)) == 2
    assert not left  # also no process that is stopped: rank 0 or torchrun has started it
    if launcher == "torchrun":
        assert re.search(rf"Root Cause.*?rank +: {trial.rank} ", text, re.DOTALL), text
    if trial.kind == "raise":
        assert "ValueError: the injected fault" in text.partition("Root Cause")[2], text


@contextlib.contextmanager
def launched(launcher: str, output: Path, trial: Trial) -> Iterator[subprocess.Popen[bytes]]:
    """The script under a launcher; whatever is left of it at the end is killed."""
    port = str(free_port())
    more = [f"--master-port={port}"] if launcher == "torchrun" else []
    command = [sys.executable, *LAUNCHERS[launcher], *more, program.__file__]
    fault = json.dumps((trial.rank, trial.kind, trial.moment))
    variables = {**os.environ, "MASTER_PORT": port, "PYTHONPATH": str(Path(__file__).parents[2]), "FAULT": fault}
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
    return {int(pid) for pid in re.findall(r"started pid (\d+)", output)}


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


def names(output: str, trial: Trial) -> bool:
    """Its activity is told only if its first heartbeat has arrived before the fault."""
    said = rf"First cause: rank {trial.rank} \(host \S+, pid \d+(, .*)?\) {SAID[trial.kind]}"
    return bool(re.search(said, output))
