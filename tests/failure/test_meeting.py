"""A port has one job: who comes to another job's port, or as a rank that is there, ends; that job goes on."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from lightning_gpp.errors import ConfigError, PeerFailure
from lightning_gpp.strategy import meeting
from tests.distributed import free_port
from tests.failure.pipeline_rank import processes_running
from tests.failure.program import fit
from tests.strategy.harness import enter


def wait_until(true: object) -> None:
    assert callable(true)
    deadline = time.monotonic() + 40
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def one_of_two_jobs(number: int, _: int, port: int, folder: str, variable: str) -> None:
    """Rank `number % 2` of job `number // 2`. If a variable tells jobs apart, the second one's rank 1 comes first."""
    enter(number % 2, 2, port)
    del os.environ["TORCHELASTIC_RUN_ID"]
    if variable:
        os.environ[variable] = str(number // 2)
    if number != 0:
        wait_until(lambda: is_open(port))
    if number == 1 and variable:
        wait_until(lambda: "MASTER_PORT" in Path(folder, "rank3.txt").read_text())
    if number == 2 or (number == 3 and not variable):
        wait_until(lambda: "trained" in Path(folder, "rank0.txt").read_text())
    fit(folder, 2)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", pytest.param("", marks=pytest.mark.acceptance)])
def test_of_two_jobs_at_one_port_the_first_goes_on(tmp_path: Path, variable: str) -> None:
    with processes_running(tmp_path, 4, one_of_two_jobs, str(tmp_path), variable) as running:
        running.wait(150)
    assert running.codes == [0, 0, 1, 1], running.output()
    assert "complete" in running.output(0)
    assert "First cause" not in running.output()
    assert re.search("ConfigError: .*MASTER_PORT.* is taken", running.output(2)), running.output(2)
    holder = running.pids[0 if variable else 1]
    assert re.search(rf"ConfigError: .*process {holder} on .*MASTER_PORT", running.output(3)), running.output(3)


def silent(server: socket.socket) -> None:
    """Accept connections, and say nothing."""
    kept = []
    with contextlib.suppress(OSError):
        while True:
            kept.append(server.accept())


def test_a_machine_without_an_address_is_not_waited_for() -> None:
    with pytest.raises(PeerFailure, match=r"'nowhere.invalid' \(MASTER_ADDR\).*Set it to the machine of rank 0"):
        meeting._store("nowhere.invalid", 29500, 1, timedelta(seconds=60))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_of_another_program_is_not_waited_for(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ASKED", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=silent, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        with pytest.raises(Exception, match="another program"):
            meeting._store("127.0.0.1", port, rank, timedelta(seconds=1))


def test_a_job_of_slurm_without_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match="has 2 tasks .*SLURM_STEP_ID.*Write srun"):
        meeting.meeting_point(SLURMEnvironment(), timedelta(seconds=1))


def test_a_rank_that_is_there_is_named() -> None:
    """Also where the launcher says nothing about the job, as if the process were a restarted one."""
    store = dist.HashStore()
    meeting._take(store, 1, "host:1")
    with pytest.raises(ConfigError, match=rf"Rank 1 of the job at host:1 .* is process {os.getpid()} on .*MASTER_PORT"):
        meeting._take(store, 1, "host:1")


def test_a_node_that_came_later_has_counted_fewer_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one job whose nodes joined at different times find each other."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    told = {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    for rank, restarts in ((0, 1), (1, 0)):
        for name, value in {**told, "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(restarts)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(meeting, "_meetings", itertools.count())
        store = meeting.meeting_point(TorchElasticEnvironment(), timedelta(seconds=2))
        assert store is not None
        store.set(f"rank {rank} met", "")
    assert store.check(["rank 0 met", "rank 1 met"])


def test_a_rank_that_comes_alone_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "_REMINDER", 0.2)
    with pytest.raises(PeerFailure, match="Rank 1 cannot reach rank 0"):
        meeting._store("127.0.0.1", free_port(), 1, timedelta(seconds=1))
    assert "Rank 1 waits for rank 0 at 127.0.0.1:" in capfd.readouterr().err
