"""Processes of one gloo group for benchmarks, and the machine's load for their reports."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

PRELOADED = [
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",
    "lightning.pytorch",
    "lightning_gpp.capture",
    "lightning_gpp.runtime",
]
"""Modules that processes need and that are slow to import: a server imports them once and forks."""


def run(world_size: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Call `function(rank, *arguments)` in `world_size` processes with one thread each."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            _main, (world_size, f"{folder}/rendezvous", function, arguments), world_size, start_method="forkserver"
        )


def load() -> str:
    """The machine's load in the last minute, in words."""
    return f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, torch {torch.__version__}"


def _main(rank: int, world_size: int, path: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
