"""Faults while Lightning trains and validates through the strategy, on each rank and in each phase."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.failure import fit_script
from tests.failure.fit_script import FAILURE_TIMEOUT, WORLD_SIZE
from tests.failure.pipeline_rank import free_port, processes_running

SAID = {
    "raise": r"raised ValueError: the injected fault",
    "kill": r"was killed",
    "stop": r"stopped answering [\d.]+ s ago \(it is stopped\)",
    "terminate": r"received SIGTERM",
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
    fit_script.fit(folder, CALLBACKS[environment.get("CALLBACK", "")](folder))


CALLBACKS = {
    "": lambda folder: [],
    "save": lambda folder: [OnExceptionCheckpoint(folder)],
}


def fault(kind: str, rank: int, phase: str) -> dict[str, str]:
    return {"FAULT": kind, "FAULT_RANK": str(rank), "FAULT_PHASE": phase}


@pytest.mark.parametrize("phase", ["warm-up", "steady", "validation"])
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("kind", ["raise", "kill", "stop"])
def test_a_fault_ends_all_ranks(tmp_path: Path, kind: str, rank: int, phase: str) -> None:
    arguments = (str(tmp_path), fault(kind, rank, phase))
    with processes_running(tmp_path, WORLD_SIZE, fit_as_torchrun_would, *arguments) as running:
        running.wait(50)
    assert time.monotonic() - began(running.output(rank)) < BOUND.get(kind, 5.0)
    assert all(running.codes), running.codes
    for other in range(WORLD_SIZE):
        assert other == rank or names(running.output(other), rank, kind), running.output()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_checkpoint_on_exception_does_not_wait_for_other_ranks(tmp_path: Path, rank: int) -> None:
    arguments = (str(tmp_path), fault("raise", rank, "steady") | {"CALLBACK": "save"})
    with processes_running(tmp_path, WORLD_SIZE, fit_as_torchrun_would, *arguments) as running:
        running.wait(50)
    assert time.monotonic() - began(running.output(rank)) < 5.0
    assert all(running.codes), running.codes
    assert names(running.output(1), rank, "raise")
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_sigterm_ends_all_ranks(tmp_path: Path, rank: int) -> None:
    arguments = (str(tmp_path), fault("terminate", rank, "steady"))
    with processes_running(tmp_path, WORLD_SIZE, fit_as_torchrun_would, *arguments) as running:
        running.wait(50)
    assert time.monotonic() - began(running.output(rank)) < 5.0
    assert running.codes[rank] == 128 + signal.SIGTERM
    assert all(running.codes), running.codes
    for each in range(WORLD_SIZE):
        assert names(running.output(each), rank, "terminate"), running.output()


def began(output: str) -> float:
    return float(output.partition("fault at ")[2].split()[0])


def names(output: str, rank: int, kind: str) -> bool:
    return bool(re.search(rf"First cause: rank {rank} \(host \S+, pid \d+, .*\) {SAID[kind]}", output))
