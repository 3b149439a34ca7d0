"""The processes of a run: their process group, failure monitor and end."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_gpp._compat.lightning import LAUNCHER, default_backend, init_process_group
from lightning_gpp.failure.processes import bind_to_parent


def tie_to_launcher(environment: ClusterEnvironment) -> None:
    """Make a process that Lightning's launcher started end with the one that started it, until there is a monitor."""
    if isinstance(environment, LightningEnvironment) and environment.local_rank() > 0 and LAUNCHER in os.environ:
        bind_to_parent(int(os.environ[LAUNCHER]))


def start_process_group(
    environment: ClusterEnvironment, backend: str | None, device: torch.device, timeout: timedelta
) -> None:
    """Initialise torch.distributed if necessary; it is destroyed when the interpreter exits."""
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
    """Destroy the process group, if there is one: Lightning does so only for NCCL."""
    if dist.is_initialized():
        dist.destroy_process_group()


def given_seed() -> int | None:
    """The seed of Lightning's `seed_everything`, if it was called."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(seed) if seed else None
