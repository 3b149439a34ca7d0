"""Private names of Lightning around processes: launchers, process groups, ranks, and sums over ranks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch

LAUNCHER: Final = "GPP_LAUNCHER_PID"
"""Environment variable with the parent's process id, for processes that the launcher started."""
_LAST: Final = 60.0
"""Seconds for which the first process waits at its end for each one that it has started."""


def subprocess_launcher(environment: Any, num_processes: int, num_nodes: int) -> Any:
    """Lightning's launcher that starts the script again for every further process; it has no public name."""
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

    launcher = _SubprocessScriptLauncher(environment, num_processes, num_nodes)
    vars(launcher)["_call_children_scripts"] = functools.partial(_call_children, launcher)  # a class would not pickle
    return launcher


def _call_children(launcher: Any) -> None:
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        type(launcher)._call_children_scripts(launcher)
    finally:
        del os.environ[LAUNCHER]
    atexit.register(_end_as_they_do, launcher.procs)


def _end_as_they_do(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Take the exit code of a process that has failed after the run, when nobody watches; Lightning ignores them."""
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if code := process.wait(_LAST):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(max(code, 1))


def multiprocessing_launcher(strategy: Any, method: str) -> Any:
    """A launcher of Python's multiprocessing, for the trainer."""
    from lightning_gpp._compat.lightning_multiprocessing import MultiProcessingLauncher

    return MultiProcessingLauncher(strategy, start_method=method)  # type: ignore[arg-type]


def init_process_group(environment: Any, backend: str, **kwargs: Any) -> None:
    """Initialise torch.distributed as DDPStrategy does, environment variables included."""
    from lightning.fabric.utilities.distributed import _init_dist_connection

    _init_dist_connection(environment, backend, **kwargs)


def default_backend(device: torch.device) -> str:
    """Lightning's choice of a process group backend: NCCL for CUDA, gloo for CPUs."""
    from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device

    return str(_get_default_process_group_backend_for_device(device))


def set_rank_zero(rank: int) -> None:
    """Set the rank of Lightning's `rank_zero_*` functions, an attribute of a function in two packages."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning_utilities.core.rank_zero import rank_zero_only as shared

    for function in (rank_zero_only, shared):
        function.rank = rank  # type: ignore[attr-defined]


def reduce_over(tensor: torch.Tensor, group: Any, reduce_op: Any) -> torch.Tensor:
    """Lightning's own reduction, with its names for operations and its handling of means on gloo."""
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available

    return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)


def gather_over(tensor: torch.Tensor, group: Any, sync_grads: bool) -> torch.Tensor:
    """Lightning's own all-gather; gradients flow back through it if `sync_grads`."""
    from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available

    return _all_gather_ddp_if_available(tensor, group, sync_grads=sync_grads)
