"""The processes of a run: their process group, failure monitor and end."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # they have no types
from torch.distributed.rendezvous import rendezvous

from lightning_gpp._compat.lightning import LAUNCHER, default_backend, init_process_group
from lightning_gpp.errors import ConfigError, PeerFailure
from lightning_gpp.failure.processes import bind_to_parent


def tie_to_launcher(environment: ClusterEnvironment) -> None:
    """Make a process that Lightning's launcher started end with the one that started it, until there is a monitor."""
    if isinstance(environment, LightningEnvironment) and environment.local_rank() > 0 and LAUNCHER in os.environ:
        bind_to_parent(int(os.environ[LAUNCHER]))


def check_script(environment: ClusterEnvironment | None, num_processes: int) -> None:
    """Refuse to start further processes where there is no script that they could run.

    Raises:
        ConfigError: this is a notebook, an interactive shell or `python -c`.
    """
    if num_processes == 1 or (environment is not None and environment.creates_processes_externally):
        return
    if hasattr(sys, "ps1") or not Path(sys.argv[0]).is_file():
        raise ConfigError(
            f"devices={num_processes} starts {num_processes - 1} more processes, each of which runs your script from "
            "its beginning, but there is none: this is a notebook, an interactive shell or `python -c`. Save the code "
            "in a file and start that (in a notebook: !python train.py), or choose devices=1 here: "
            "strategy.delayed_devices and gpp-plan show there how a pipeline would train."
        )


def meeting_point(environment: ClusterEnvironment, patience: timedelta) -> Store | None:
    """The store in which ranks find each other before there is a process group; None if there is one already.

    Each restart by torchrun has its own part of the store: in the old one are the addresses of processes that ended.
    Likewise each process group, if user code destroys one between two runs.
    """
    if dist.is_initialized():
        return None
    attempt = f"gpp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_meetings)}"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(rendezvous("env://", timeout=patience))
        return PrefixStore(attempt, store)
    rank, world_size = environment.global_rank(), environment.world_size()
    address, port = environment.main_address, environment.main_port
    try:
        store = _store(address, port, world_size, rank == 0, patience)
    except dist.DistError as error:
        raise PeerFailure(
            f"Rank {rank} cannot reach rank 0 at {address}:{port} (MASTER_ADDR, MASTER_PORT): {error}. Its process has "
            "ended, or has not come so far: look at its output."
        ) from error
    store.set_timeout(patience)
    return PrefixStore(attempt, store)


_meetings: Final = itertools.count()
"""Numbers the process groups of this process; all ranks start them in the same order."""


@cache
def _store(address: str, port: int, world_size: int, serves: bool, patience: timedelta) -> Store:
    """The store of this process; it stays, because other ranks would still find it while rank 0 makes a new one."""
    return TCPStore(address, port, world_size, serves, patience, wait_for_workers=False, multi_tenant=True)


def start_process_group(
    environment: ClusterEnvironment,
    backend: str | None,
    device: torch.device,
    timeout: timedelta,
    store: Store | None,
) -> None:
    """Initialise torch.distributed if necessary; it is destroyed when the interpreter exits."""
    if store is None:
        return
    store.set_timeout(timeout)
    init_process_group(
        environment,
        backend or default_backend(device),
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
        store=store,
    )
    atexit.register(leave)


def leave() -> None:
    """Destroy the process group, if there is one: Lightning does so only for NCCL."""
    if dist.is_initialized():
        dist.destroy_process_group()


def given_seed() -> int | None:
    """The seed of Lightning's `seed_everything`, if it was called."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(seed) if seed else None
