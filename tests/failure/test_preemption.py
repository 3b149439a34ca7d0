"""A signal to any rank, at any time: all ranks save and end together, and a new job goes on to the same values."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_gpp.strategy.guard import next_path
from tests.failure.pipeline_rank import Job, processes_running
from tests.failure.program import as_torchrun_would

WORLD_SIZE = 3
PATIENCE = 200.0
"""Seconds in which a job ends on a busy machine."""
TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


def start(folder: Path, *asked: Any, **more: Any) -> Any:
    return processes_running(folder, WORLD_SIZE, as_torchrun_would, str(folder), asked, more)


def told(running: Job) -> list[str]:
    """The values that rank 0 printed, in all runs in this folder."""
    return re.findall("^(?:trained|validated) .*$", running.output(0), re.MULTILINE)


@functools.cache
def undisturbed(**more: Any) -> list[str]:
    with tempfile.TemporaryDirectory() as folder, start(Path(folder), **more) as running:
        running.wait(PATIENCE)
        assert running.codes == [0] * WORLD_SIZE, running.output()
        return told(running)


def resumed(folder: Path, **more: Any) -> list[str]:
    with start(folder, **more) as running:
        running.wait(PATIENCE)
        assert running.codes == [0] * WORLD_SIZE, running.output()
        return told(running)


@pytest.mark.parametrize(
    ("moment", "rank", "number"),
    [
        pytest.param("set-up", 1, USR1, marks=pytest.mark.acceptance),
        ("step 2", 2, USR2),
        pytest.param("validation 3 1", 0, TERM, marks=pytest.mark.acceptance),
        pytest.param("step 6", 0, USR2, marks=pytest.mark.acceptance),
        pytest.param("epoch 0", 1, TERM, marks=pytest.mark.acceptance),
        pytest.param("end", 2, USR1, marks=pytest.mark.acceptance),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_values(tmp_path: Path, moment: str, rank: int, number: int) -> None:
    with start(tmp_path, rank, int(number), moment) as running:
        running.wait(PATIENCE)
    assert running.codes == [128 + number] * WORLD_SIZE, running.output()
    assert "Traceback" not in running.output()
    assert running.output(0).count("All ranks end with exit code") == 1
    assert (number == USR2) == all("handed on" in running.output(each) for each in range(WORLD_SIZE))
    assert resumed(tmp_path) == undisturbed()


@pytest.mark.acceptance
def test_gradients_of_an_unfinished_optimizer_step_are_not_lost(tmp_path: Path) -> None:
    more = {"accumulate_grad_batches": 3}
    with start(tmp_path, 1, USR1, "step 1", **more) as running:
        running.wait(PATIENCE)
    assert running.codes == [128 + USR1] * WORLD_SIZE, running.output()
    assert resumed(tmp_path, **more) == undisturbed(**more)


def test_the_next_path(tmp_path: Path) -> None:
    assert next_path(str(tmp_path)) == str(tmp_path / "hpc_ckpt_1.ckpt")
    (tmp_path / "hpc_ckpt_9.ckpt").touch()
    (tmp_path / "hpc_ckpt_10.ckpt").touch()
    assert next_path(str(tmp_path)) == str(tmp_path / "hpc_ckpt_11.ckpt")


def asked_at_random(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    with start(folder) as running:
        running.wait_for("started", PATIENCE)
        time.sleep(chance.uniform(0, 4))
        number, ranks = chance.choice([TERM, USR1]), chance.choice([[0], [1], [2], [0, 1, 2], [2, 2]])
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pids[rank], number)
        running.wait(PATIENCE)
    if -number in running.codes:  # before `trainer.fit`, or after its end, the signal does what it does to any process
        assert all(running.codes) or "complete" in running.output(), running.output()
    else:
        assert set(running.codes) in ({0}, {128 + number}), running.output()
    assert resumed(folder)[-1:] == undisturbed()[-1:]


@pytest.mark.acceptance
@pytest.mark.parametrize("seed", range(50))
def test_at_any_moment(tmp_path: Path, seed: int) -> None:
    asked_at_random(tmp_path, seed)


def without_rank_2(rank: int, world_size: int, port: int, folder: str) -> None:
    if rank == 2:
        time.sleep(60)
    as_torchrun_would(rank, world_size, port, folder, (), {})


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    mask = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(mask and int(mask[1], 16) >> (number - 1) & 1)


def test_ranks_that_wait_for_one_that_does_not_come_end_at_once(tmp_path: Path) -> None:
    with processes_running(tmp_path, WORLD_SIZE, without_rank_2, str(tmp_path)) as running:
        for rank in (0, 1):
            while not catches(running.pids[rank], TERM):
                time.sleep(0.05)
        for rank in (0, 1):
            os.kill(running.pids[rank], TERM)
        for rank in (0, 1):
            running.processes[rank].join(10)
    assert running.codes[:2] == [128 + TERM] * 2, running.output()
    assert "Received SIGTERM before all ranks were there" in running.output(0)


def test_ctrl_c_ends_all_ranks_without_a_traceback(tmp_path: Path) -> None:
    with start(tmp_path, 1, signal.SIGINT, "step 2") as running:
        running.wait(PATIENCE)
    assert running.codes == [130] * WORLD_SIZE, running.output()
    assert "Traceback" not in running.output()
    for rank in range(WORLD_SIZE):
        assert re.search(r"First cause: rank 1 \(.*\) was interrupted", running.output(rank))
