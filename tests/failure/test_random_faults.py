"""Random faults: kinds x moments x ranks x launchers. None hangs, no process remains, the exit code is not zero, the
first cause is named, and the last checkpoint resumes to the same values.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.failure import faulty
from tests.failure.faulty import KINDS, MOMENTS, WORLD_SIZE
from tests.failure.pipeline_rank import CONTEXT, free_port
from tests.failure.test_fit import is_running

BOUND = 30.0
"""Seconds from the fault to the end of all; a quiet machine needs less than 5."""
BOUND_OF_STOPPED = 75.0
"""The same for a process that is stopped, which torchrun kills 30 s after SIGTERM."""
LIMIT = 150.0
"""Seconds of a run; its start takes most of them on a busy machine."""
PATIENCE = 5.0
"""Seconds for the other processes to end after the one that was started, which may be a rank itself."""
SEEDS = range(*map(int, os.environ.get("GPP_FAULTS", "0:300").split(":")))
SAMPLE = (3,)
"""Faults that every run of the tests tries."""

SAID = {
    "kill": r"was killed",
    "stop": r"stopped answering",
    "exit 0": r"(exited with code 0|was killed or exited) without finishing",
    "exit 1": r"(exited with code 1|was killed or exited) without finishing",
    "raise": r"raised ValueError: the injected fault",
    "memory": r"raised RuntimeError: .*(memory|allocate)",
    "interrupt": r"was interrupted",
    "interrupt all": r"was interrupted",
    "worker raises": r"raised ValueError: Caught ValueError in DataLoader worker",
    "worker killed": r"raised RuntimeError: DataLoader worker .* killed by signal",
    "disk full": r"raised (RuntimeError|OSError|CheckpointError)",
}


@dataclass(frozen=True)
class Trial:
    """A fault, and who starts the processes."""

    kind: str
    moment: str
    rank: int
    launcher: str

    @classmethod
    def random(cls, seed: int) -> Trial:
        chance = random.Random(seed)
        kind, moment = chance.choice(list(KINDS)), chance.choice(MOMENTS)
        rank = chance.randrange(WORLD_SIZE)
        launcher = "lightning" if chance.random() < 0.1 else "torchrun"
        if kind.startswith("worker"):
            rank, moment = 0, "loading"
        if kind == "disk full":
            rank, moment = 0, "saving"
        if moment == "import" and (kind in ("stop", "exit 0") or launcher == "lightning"):
            moment = "start-up"  # before the watch stands, such a process is one that never comes
        if kind == "stop" and launcher == "lightning":
            rank = max(rank, 1)  # nobody ends a launcher that is stopped
        return cls(kind, moment, rank, launcher)


WHILE_SAVING: Final = [Trial("raise", "saving", 1, "torchrun"), Trial("disk full", "saving", 0, "torchrun")]


@functools.cache
def undisturbed() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        ended = run(Path(folder), None)
        assert ended.code == 0, ended.text
        return told(ended.text)


def told(text: str) -> list[str]:
    return re.findall("^(?:trained|validated) .*$", text, re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """The end of a run.

    Args:
        code: the exit code of the process that was started; None if it had to be killed.
        at: time of its end.
        left: processes that were still there some seconds later.
        text: what they all said.
    """

    code: int | None
    at: float
    left: set[int]
    text: str


def run(folder: Path, trial: Trial | None) -> Ended:
    output = folder / f"output{len(list(folder.glob('output*')))}.txt"
    output.touch()
    if trial is None or trial.launcher == "torchrun":
        return of_torchrun(folder, trial, output)
    return of_command([sys.executable, faulty.__file__], folder, trial, output)


def end(folder: Path, session: int, code: int | None, output: Path) -> Ended:
    """Wait for the other processes of a run, and kill those that are left."""
    at = time.monotonic()
    left = still_there(folder, PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return Ended(code, at, left, output.read_text())


def of_torchrun(folder: Path, trial: Trial | None, output: Path) -> Ended:
    fault = (trial.kind, trial.moment, trial.rank) if trial else None
    process = CONTEXT.Process(target=faulty.under_torchrun, args=(str(folder), fault, str(output), free_port()))
    process.start()
    process.join(LIMIT)
    ended = end(folder, process.pid or 0, process.exitcode, output)
    process.join()
    return ended


def of_command(command: list[str], folder: Path, trial: Trial, output: Path) -> Ended:
    fault = json.dumps((trial.kind, trial.moment, trial.rank))
    variables = {
        **os.environ,
        "FAULT": fault,
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    with output.open("wb") as stream:
        piped = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=stream)
        process = subprocess.Popen(
            command, stdout=piped.stdin, stderr=piped.stdin, cwd=folder, env=variables, start_new_session=True
        )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LIMIT)
    ended = end(folder, process.pid, process.poll(), output)
    process.wait()
    piped.communicate()
    return ended


def still_there(folder: Path, patience: float) -> set[int]:
    """Processes that work in a folder and have not ended after `patience` seconds."""
    deadline = time.monotonic() + patience
    while (left := {pid for pid in working_in(folder) if is_running(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def working_in(folder: Path) -> set[int]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended
            if link.readlink() == folder:
                found.add(int(link.parent.name))
    return found


def since_fault(ended: Ended) -> float | None:
    """Seconds from the fault to the end; None if it did not happen."""
    faults = re.findall(r"^fault at ([\d.]+)$", ended.text, re.MULTILINE)
    return ended.at - float(faults[0]) if faults else None


def hung_in_fork(ended: Ended, trial: Trial) -> bool:
    """True if a process that torchrun's agent forked, to start faster than by itself, has not come to its first line.

    CPython before 3.11.8 and 3.12.2 may hang in a fork, https://github.com/python/cpython/issues/112275.
    """
    seconds = since_fault(ended)
    late = seconds is None or seconds > BOUND
    return late and trial.launcher == "torchrun" and ended.text.count("\nbegan\n") < WORLD_SIZE


def check(folder: Path, trial: Trial) -> float:
    """Seconds from the fault to the end."""
    ended = run(folder, trial)
    if hung_in_fork(ended, trial):
        ended = run(folder, trial)
    text, seconds = ended.text, since_fault(ended)
    assert seconds is not None, (trial, "did not happen", text)
    assert ended.code, (trial, text)
    assert seconds < (BOUND_OF_STOPPED if trial.kind == "stop" else BOUND), (trial, text)
    assert not ended.left, (trial, text)
    assert names_cause(text, trial), (trial, text)
    resumed = run(folder, None)
    assert resumed.code == 0, (trial, resumed.text)
    values = told(resumed.text)
    assert undisturbed()[len(undisturbed()) - len(values) :] == values, (trial, resumed.text)
    return seconds


def names_cause(text: str, trial: Trial) -> bool:
    """The watch names the cause; before it stands the launcher does."""
    if trial.moment == "import":
        return bool(re.search(rf"rank +: {trial.rank} |local_rank: {trial.rank} |task {trial.rank}: |got signal", text))
    if trial.kind == "terminate":
        return "Received SIGTERM" in text
    rank = r"\d" if trial.kind == "interrupt all" else trial.rank
    doing = "doing: (collecting the state for a checkpoint|saving .*)" if trial in WHILE_SAVING else ".*"
    return bool(re.search(rf"First cause: rank {rank} \(.*{doing}\) {SAID[trial.kind]}", text))


@pytest.mark.acceptance
@pytest.mark.timeout(300)
@pytest.mark.parametrize("trial", WHILE_SAVING, ids=str)
def test_a_cause_while_saving_says_so(tmp_path: Path, trial: Trial) -> None:
    check(tmp_path, trial)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SAMPLE)
def test_a_few_random_faults(tmp_path: Path, seed: int) -> None:
    check(tmp_path, Trial.random(seed))


@pytest.mark.acceptance
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults(tmp_path: Path, seed: int) -> None:
    trial = Trial.random(seed)
    print(trial, f"{check(tmp_path, trial):.1f} s")
