"""The processes of a run: their group, who watches over them, and how they end."""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_gpp._compat.lightning import LAUNCHER, default_backend, init_process_group
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.failure.processes import bind_to_parent, release_from_parent
from lightning_gpp.training.control import Control

HEARTBEATS: Final = 5
"""A rank counts as stopped after this part of the time in which all ranks must have ended."""


def tie_to_launcher(environment: ClusterEnvironment) -> None:
    """A process that Lightning's launcher started ends with the one that started it, until it is watched over."""
    if isinstance(environment, LightningEnvironment) and environment.local_rank() > 0 and LAUNCHER in os.environ:
        bind_to_parent(int(os.environ[LAUNCHER]))


def join(environment: ClusterEnvironment, backend: str | None, device: torch.device, timeout: timedelta) -> None:
    """Initialise torch.distributed, unless it is; it is destroyed when the interpreter exits."""
    if dist.is_initialized():
        return
    init_process_group(
        environment,
        backend or default_backend(device),
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    atexit.register(leave)


def leave() -> None:
    """Destroy the process group, if there is one: Lightning does so for NCCL only."""
    if dist.is_initialized():
        dist.destroy_process_group()


def watch(control: Control, limit: timedelta, describe: Callable[[], str]) -> FailureMonitor:
    """Start watching over all ranks; after a failure they end within about `limit`."""
    seconds = limit.total_seconds()
    monitor = FailureMonitor(
        rank=control.rank,
        world_size=control.world_size,
        timeout=seconds / HEARTBEATS,
        describe=describe,
        exit_grace=min(5.0, seconds / HEARTBEATS),
        patience=max(60.0, seconds),
    )
    monitor.start()
    release_from_parent()
    return monitor


def agreed_seed(seed: int | None, control: Control) -> int:
    """The seed of the random streams: as given, else `seed_everything`'s, else drawn by rank zero."""
    if seed is None and os.environ.get("PL_GLOBAL_SEED"):
        seed = int(os.environ["PL_GLOBAL_SEED"])
    return int(control.broadcast(secrets.randbits(62) if seed is None else seed))
