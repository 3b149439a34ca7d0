"""The store in which the processes of a job find each other: a port has one job, and a rank has one process.

A port may be another job's: MASTER_PORT was copied, SLURM's steps of one allocation share it, an earlier start has not
ended. So rank 0 says in the store whose it is, as far as the launcher tells, and each process takes its rank there. Who
finds another job, or its rank taken, ends; the job that was there first does not notice.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
from datetime import timedelta
from functools import cache
from typing import Final

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # they have no types
from torch.distributed.rendezvous import rendezvous

from lightning_gpp.errors import ConfigError, PeerFailure
from lightning_gpp.failure.processes import bounded, say

_ASKED: Final = timedelta(seconds=5)
"""The time for a listener to answer, besides that for rank 0 to come."""
_REMINDER: Final = 20.0
"""Seconds after which a rank says that it waits for rank 0."""
_JOB: Final = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
"""Environment variables by which launchers tell jobs apart."""
_REMEDY: Final = (
    "Two jobs need two ports: set the environment variable MASTER_PORT to a free one for this job, on all ranks. If "
    "that is left of an earlier start of this job, end it."
)


def meeting_point(environment: ClusterEnvironment, patience: timedelta) -> Store | None:
    """The store in which ranks find each other before there is a process group; None if there is one already.

    Where torchrun's agents keep the store, each restart has its own part of it: in the old one are the addresses of
    processes that ended. Rank 0's own store ends with it, and numbers no restarts: of these, nodes that came later have
    counted fewer. Each process group has its own part, too, if user code destroys one between two runs.

    Raises:
        ConfigError: the port is another job's, another process is this rank, or SLURM has not started this process.
        PeerFailure: rank 0 cannot be reached.
    """
    if dist.is_initialized():
        return None
    size, by_slurm = environment.world_size(), isinstance(environment, SLURMEnvironment)
    if size > 1 and by_slurm and "SLURM_STEP_ID" not in os.environ:
        raise ConfigError(
            f"SLURM has {size} tasks for this job (SLURM_NTASKS), but srun has not started this process (there is no "
            "SLURM_STEP_ID), so that the others would not come. Write srun before the command."
        )
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    part = f"gpp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if kept else 0}/{next(_meetings)}"
    address, port, rank = environment.main_address, environment.main_port, environment.global_rank()
    if kept:
        store, _, _ = next(rendezvous("env://", timeout=patience))
    else:
        store = _store(address, port, rank, patience)
        store.set_timeout(patience)
    store = PrefixStore(part, store)
    _check_job(store, rank, f"{address}:{port}")
    _take(store, rank, f"{address}:{port}")
    return store


_meetings: Final = itertools.count()
"""Numbers the process groups of this process; all ranks start them in the same order."""


@cache
def _store(address: str, port: int, rank: int, patience: timedelta) -> Store:
    """The store of this process; it stays, because other ranks would still find it while rank 0 makes a new one."""
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise PeerFailure(
            f"Rank {rank} cannot reach rank 0 at {address!r} (MASTER_ADDR): {error.strerror}. Set it to the machine of "
            "rank 0."
        ) from error
    made: list[Store] = []
    failed: list[Exception] = [dist.DistNetworkError("who listens there does not answer")]

    def connect() -> None:
        try:
            made.append(TCPStore(address, port, None, rank == 0, patience, wait_for_workers=False, multi_tenant=True))
        except dist.DistError as error:
            failed.append(error)

    told = f"Rank {rank} waits for rank 0 at {address}:{port}. If nobody starts it, unset LOCAL_RANK here."
    reminder = threading.Timer(_REMINDER, say, [told])
    reminder.start()
    bounded(connect, (patience + _ASKED).total_seconds())  # a silent listener is not waited for
    reminder.cancel()
    if made:
        return made[0]
    if rank == 0 and "EADDRINUSE" in str(failed[-1]):
        shown = f"another program or job (ss -ltnp 'sport = :{port}' shows it)"
        raise ConfigError(f"Port {port} of this machine (MASTER_PORT) is taken by {shown}. {_REMEDY}") from failed[-1]
    raise PeerFailure(
        f"Rank {rank} cannot reach rank 0 at {address}:{port} (MASTER_ADDR, MASTER_PORT): {failed[-1]}. Its process "
        "has ended, or has not come so far: look at its output. Or the port is another program's."
    ) from failed[-1]


def _check_job(store: Store, rank: int, place: str) -> None:
    """Say whose store it is, on rank 0. Raises ConfigError if it is another job's, before it loses a rank to this."""
    own = " ".join(f"{name}={os.environ[name]}" for name in _JOB if name in os.environ)
    if rank == 0:
        store.set("job", f"{own}\n{_this_process()}")
        return
    job, process = store.get("job").decode().split("\n")
    if own and job and own != job:
        raise ConfigError(
            f"{place} (MASTER_ADDR, MASTER_PORT) is taken by another job ({job}; rank 0 is {process}), and this is "
            f"{own}. {_REMEDY}"
        )


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
