"""Places for the processes of a pipeline: which devices and which transport they have, and how they are run there."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """Processes and their devices.

    Args:
        name: the seating in words.
        needs: number of GPUs without which it does not exist.
        processes: number of processes; 0 for one per GPU.
        backend: backend of torch.distributed.
    """

    name: str
    needs: int
    processes: int
    backend: str = "gloo"

    @property
    def exists(self) -> bool:
        return torch.cuda.device_count() >= self.needs

    @property
    def on_gpu(self) -> bool:
        return self.needs > 0

    @property
    def world_size(self) -> int:
        return self.processes or min(3, torch.cuda.device_count())

    def device(self, rank: int) -> torch.device:
        """The device of a rank; processes over gloo share the first GPU."""
        if not self.on_gpu:
            return torch.device("cpu")
        return torch.device("cuda", rank if self.backend == "nccl" else 0)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(device, *arguments)` in every process; returns the results by rank."""
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.set_forkserver_preload(
                ["benchmarks.gpu.parts", "benchmarks.gpu.features", "benchmarks.gpu.beside_torch"]
            )
            start_processes(_main, (self, folder, function, arguments), self.world_size, start_method="forkserver")
            return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(self.world_size)]


NCCL = Seating(name="one process per GPU, NCCL", needs=2, processes=0, backend="nccl")
SHARED = Seating(name="two processes on one GPU, gloo through host memory", needs=1, processes=2)
ALONE = Seating(name="all stages in one process, one GPU", needs=1, processes=1)
CPUS = Seating(name="two processes on CPUs, gloo", needs=0, processes=2)
CPU = Seating(name="all stages in one process, CPU", needs=0, processes=1)
SEATINGS = (NCCL, SHARED, ALONE, CPUS, CPU)


def here() -> list[Seating]:
    """The seatings of this machine: those on GPUs, or if it has none, those on CPUs."""
    gpus = torch.cuda.is_available()
    return [seating for seating in SEATINGS if seating.exists and seating.on_gpu == gpus]


def _main(rank: int, seating: Seating, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    os.environ["XDG_CACHE_HOME"] = folder  # costs are measured anew
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = seating.device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        seating.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=seating.world_size,
        device_id=device if seating.backend == "nccl" else None,  # as Lightning does; communicators are then split
    )
    Path(folder, str(rank)).write_bytes(pickle.dumps(function(device, *arguments)))
    dist.barrier()
    dist.destroy_process_group()


def machine() -> str:
    """The machine of the report in words."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = f"torch {torch.__version__}" + (f", CUDA {torch.version.cuda}" if gpus else "")
    load = f"load average {os.getloadavg()[0]:.1f}"
    return (
        f"{len(gpus)} GPUs ({', '.join(sorted(set(gpus))) or 'none'}), {os.cpu_count()} CPU cores, {load}, {versions}"
    )
