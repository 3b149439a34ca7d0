"""What the failure monitor must not take for a failure, and what it must tell apart."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gpp.errors import PeerFailure
from lightning_gpp.failure.limits import Limits
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.failure.processes import ProcessIdentity
from lightning_gpp.failure.report import is_consequence
from tests.failure.pipeline_rank import Rank, job, processes_running

# --- ends and pauses that are no failures


def busy_and_ending_at_different_times(rank: Rank) -> None:
    rank.exchange()
    end = time.monotonic() + 2.0
    while rank.rank == 1 and time.monotonic() < end:
        sum(range(1000))
    rank.exchange()
    time.sleep((rank.rank + 1) % 3)


def test_a_busy_rank_and_one_that_ends_later_are_no_failures(tmp_path: Path) -> None:
    with job(tmp_path, busy_and_ending_at_different_times, timeout=1.0) as running:
        running.wait(30)
    assert running.codes == [0, 0, 0]
    assert running.output().strip() == ""


def ready_then_a_few_steps(rank: Rank) -> None:
    print("ready", flush=True)
    for _ in range(200):
        rank.exchange()


def test_without_a_timeout_a_rank_may_be_stopped_in_a_debugger(tmp_path: Path) -> None:
    with job(tmp_path, ready_then_a_few_steps, timeout=None) as running:
        running.wait_for("ready")
        os.kill(running.pids[1], signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(running.pids[1], signal.SIGCONT)
        running.wait(30)
    assert running.codes == [0, 0, 0]


def test_a_job_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    with job(tmp_path, ready_then_a_few_steps, timeout=1.0) as running:
        running.wait_for("ready")
        for pid in running.pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        for pid in running.pids:
            os.kill(pid, signal.SIGCONT)
        running.wait(30)
    assert running.codes == [0, 0, 0], running.output()


# --- what is told apart


def wrapping_errors_of_communication(rank: Rank) -> None:
    while True:
        if rank.step == 10 and rank.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            rank.exchange()
        except RuntimeError as error:
            raise ValueError("user code in between") from error


def test_an_error_that_only_follows_from_a_killed_rank_is_not_the_cause(tmp_path: Path) -> None:
    with job(tmp_path, wrapping_errors_of_communication) as running:
        running.wait(30)
    assert running.codes == [1, 1, -9]
    assert "First cause: rank 2" in running.output(0)
    assert "First cause: rank 2" in running.output(1)
    assert "user code in between" not in running.output(0, 1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError(), True),
        (PeerFailure("rank 2"), True),
        (dist.DistBackendError("NCCL"), True),
        (RuntimeError("the gloo backend is not supported by this layer"), False),
        (torch.OutOfMemoryError("gloo"), False),
        (ValueError("boom"), False),
    ],
)
def test_consequences_are_told_from_causes(error: Exception, expected: bool) -> None:
    with pytest.raises(type(error)) as caught:
        raise error
    assert is_consequence(caught.value) is expected


# --- the start


def start_late(rank: int, world_size: int, port: int, timeout: float, patience: float, late: str) -> None:
    """Start the watch of a rank; the last rank comes 3 s later, never, or when another one has been killed."""
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=30), wait_for_workers=False)
    limits = Limits(silence=timeout, patience=patience)
    last, monitor = rank == world_size - 1, FailureMonitor(rank=rank, world_size=world_size, limits=limits)
    if last:
        time.sleep({"3 s": 3.0}.get(late, 60.0))
    monitor.start(store)
    print("together", flush=True)
    if late == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    monitor.stop()


def unseen(self: ProcessIdentity) -> str:
    return "?"


def start_late_on_other_hosts(rank: int, world_size: int, port: int, *more: Any) -> None:
    """Start as ranks do of which nobody sees the process."""
    ProcessIdentity.state = unseen  # type: ignore[method-assign]
    start_late(rank, world_size, port, *more)


def test_a_rank_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """The others hear of each other meanwhile, also if they are on hosts of their own."""
    with processes_running(tmp_path, 3, start_late_on_other_hosts, 1.0, 30.0, "3 s") as running:
        running.wait(40)
    assert running.codes == [0, 0, 0], running.output()
    assert running.output().split() == ["together"] * 3


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with processes_running(tmp_path, 3, start_late, 5.0, 3.0, "never") as running:
        for process in running.processes[:2]:
            process.join(30)
        assert all(running.codes[:2])
    assert re.search(r"ranks \[2\] did not start within 3 s", running.output(0))
    assert re.search(r"First cause: rank 0 .*ranks \[2\] did not start", running.output(1))


def test_a_rank_that_fails_while_others_are_missing_ends_those_that_have_come(tmp_path: Path) -> None:
    with processes_running(tmp_path, 3, start_late, 5.0, 30.0, "killed") as running:
        running.processes[0].join(60)
        assert running.codes[:2] == [1, -signal.SIGKILL]
    assert "First cause: rank 1" in running.output(0)


# --- processes


def test_how_a_process_ended() -> None:
    child = subprocess.Popen(["sleep", "60"])
    identity = identify(child.pid)
    child.kill()
    assert identity.ending() == "was killed by SIGKILL"
    child.wait()
    assert identity.state() == ""
    assert identity.ending() == "was killed or exited without finishing"


def identify(pid: int) -> ProcessIdentity:
    me = ProcessIdentity.current()
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return ProcessIdentity(host=me.host, machine=me.machine, pid=pid, started=started)
