"""The store in which the processes of a job find each other: a port has one job, and a rank has one process.

A port may be another job's: MASTER_PORT was copied, SLURM's steps of one allocation share it, an earlier start has not
ended. So rank 0 says in the store whose it is, as far as the launcher tells, and each process takes its rank there. Who
finds another job, or its rank taken, ends; the job that was there first does not notice.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Final

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # they have no types
from torch.distributed.rendezvous import rendezvous

from lightning_gpp._compat.lightning_processes import LAUNCHER
from lightning_gpp.errors import ConfigError, PeerFailure
from lightning_gpp.failure.processes import bounded

_OWNER: Final = "gpp owner"
"""Key of the job and of the process of rank 0 that serve a store."""
_ASKED: Final = timedelta(seconds=5)
"""The time for who has taken a port to say so."""
_STEP: Final = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_REMEDY: Final = (
    "Two jobs need two ports: set the environment variable MASTER_PORT to a free one for this job, on all ranks. If "
    "that is left of an earlier start of this job, end it."
)


def meeting_point(environment: ClusterEnvironment, num_nodes: int, patience: timedelta) -> Store | None:
    """The store in which ranks find each other before there is a process group; None if there is one already.

    Each restart by torchrun has its own part of the store: in the old one are the addresses of processes that ended.
    Likewise each process group, if user code destroys one between two runs.

    Raises:
        ConfigError: the port is another job's, or another process is this rank.
        PeerFailure: rank 0 cannot be reached.
    """
    if dist.is_initialized():
        return None
    attempt = f"gpp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_meetings)}"
    address, port, rank = environment.main_address, environment.main_port, environment.global_rank()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(rendezvous("env://", timeout=patience))
    else:
        store = _store(address, port, rank, job_of(environment, num_nodes), patience)
        store.set_timeout(patience)
    store = PrefixStore(attempt, store)
    _take(store, rank, f"{address}:{port}")
    return store


_meetings: Final = itertools.count()
"""Numbers the process groups of this process; all ranks start them in the same order."""


def job_of(environment: ClusterEnvironment, num_nodes: int) -> str:
    """The id that tells this job from others with the same port; empty if the launcher does not say."""
    if run := os.environ.get("TORCHELASTIC_RUN_ID"):
        return f"torchrun's run {run}"
    if isinstance(environment, SLURMEnvironment):
        return " ".join(f"{name}={os.environ[name]}" for name in _STEP if name in os.environ)
    if num_nodes > 1:
        return ""  # each machine has a launcher of its own
    launcher = os.environ.get(LAUNCHER)
    return f"started by process {launcher}" if launcher else ""


@cache
def _store(address: str, port: int, rank: int, job: str, patience: timedelta) -> Store:
    """The store of this process; it stays, because other ranks would still find it while rank 0 makes a new one."""
    try:
        store = _connected(address, port, patience, serves=rank == 0)
        if rank == 0:
            store.set(_OWNER, json.dumps([job, _this_process()]))
        owner, process = json.loads(store.get(_OWNER))
    except dist.DistError as error:
        if rank == 0 and "EADDRINUSE" in str(error):
            raise ConfigError(_taken(f"Port {port} of this machine (MASTER_PORT)", _holder(address, port))) from error
        raise PeerFailure(
            f"Rank {rank} cannot reach rank 0 at {address}:{port} (MASTER_ADDR, MASTER_PORT): {error}. Its process has "
            "ended, or has not come so far: look at its output. Or the port is another program's."
        ) from error
    if job and owner and job != owner:
        raise ConfigError(_taken(f"{address}:{port} (MASTER_ADDR, MASTER_PORT)", _told(owner, process)))
    return store


def _connected(address: str, port: int, patience: timedelta, *, serves: bool = False) -> Store:
    """A store that this process serves, or another one. Who listens there and says nothing is not waited for."""
    made: list[Store] = []
    failed: list[Exception] = [dist.DistNetworkError("who listens there does not answer")]

    def connect() -> None:
        try:
            made.append(TCPStore(address, port, None, serves, patience, wait_for_workers=False, multi_tenant=True))
        except dist.DistError as error:
            failed.append(error)

    bounded(connect, (patience + _ASKED).total_seconds())
    if not made:
        raise failed[-1]
    return made[0]


def _taken(port: str, by: str) -> str:
    return f"{port} is taken by {by}. {_REMEDY}"


def _holder(address: str, port: int) -> str:
    """Who serves a port of this machine, in words."""
    with suppress(dist.DistError, ValueError):
        return _told(*json.loads(_connected(address, port, _ASKED).get(_OWNER)))
    return f"another program (ss -ltnp 'sport = :{port}' shows it)"


def _told(job: str, process: str) -> str:
    return f"another job ({job + ', ' if job else ''}rank 0 is {process})"


def _take(store: Store, rank: int, place: str) -> None:
    """Take a rank for this process. Raises ConfigError if another one has it."""
    own = f"{secrets.token_hex(8)} {_this_process()}"
    holder = store.compare_set(f"rank {rank}", "", own).decode()
    if holder != own:
        raise ConfigError(
            f"Rank {rank} of the job at {place} (MASTER_ADDR, MASTER_PORT) is {holder.partition(' ')[2]}, and this is "
            f"{_this_process()}. {_REMEDY} Or two processes were given the same rank."
        )


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
