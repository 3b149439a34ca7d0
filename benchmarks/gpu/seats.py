"""Places for the processes of a pipeline: which devices and which transport they have, and how they are run there."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

from lightning_gpp.runtime.mesh import open_queues

Outcome = tuple[list[Any], ProcessRaisedException | None]
"""The results of a call by rank, or the error that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """Processes and their devices.

    Args:
        name: the seating in words.
        needs: number of GPUs without which it does not exist.
        processes: number of processes; 0 for one per GPU.
        backend: backend of torch.distributed.
        hosts: NCCL takes each process for one of a host of its own. It refuses two processes with one GPU on a host;
            of several hosts it sends their messages through sockets.
    """

    name: str
    needs: int
    processes: int
    backend: str = "gloo"
    hosts: bool = False

    @property
    def exists(self) -> bool:
        there = torch.cuda.device_count()
        return there == self.needs if self.hosts else there >= self.needs

    @property
    def on_gpu(self) -> bool:
        return self.needs > 0

    @property
    def world_size(self) -> int:
        return self.processes or min(3, torch.cuda.device_count())

    def device(self, rank: int) -> torch.device:
        """The device of a rank; where it is not told, processes share the first GPU."""
        if not self.on_gpu:
            return torch.device("cpu")
        return torch.device("cuda", 0 if self.processes else rank)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call `function(device, **arguments)` in every process; returns the results by rank."""
        ((results, error),) = self.run_each([partial(function, **arguments)])
        if error is not None:
            raise error
        return results

    def run_each(self, calls: Sequence[Callable[[torch.device], Any]]) -> list[Outcome]:
        """Make calls one after the other in the same processes; in new ones after an error, which ends them all."""
        found: list[Outcome] = []
        while len(found) < len(calls):
            found += self._run(calls[len(found) :])
        return found

    def _run(self, calls: Sequence[Callable[[torch.device], Any]]) -> Iterator[Outcome]:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.set_forkserver_preload(
                ["benchmarks.gpu.parts", "benchmarks.gpu.features", "benchmarks.gpu.beside_torch"]
            )
            error = None
            try:
                start_processes(_main, (self, folder, calls), self.world_size, start_method="forkserver")
            except ProcessRaisedException as raised:
                error = raised
            ranks = range(self.world_size)
            for number in range(len(calls)):
                files = [Path(folder, f"{number}-{rank}") for rank in ranks]
                if not all(file.exists() for file in files):
                    yield [], error
                    return
                yield [pickle.loads(file.read_bytes()) for file in files], None
            if error is not None:
                raise error


NCCL = Seating(name="one process per GPU, NCCL", needs=2, processes=0, backend="nccl")
SHARED = Seating(name="two processes on one GPU, gloo through host memory", needs=1, processes=2)
ALONE = Seating(name="all stages in one process, one GPU", needs=1, processes=1)
SOCKETS = Seating(
    name="two processes on one GPU, NCCL through sockets", needs=1, processes=2, backend="nccl", hosts=True
)
CPUS = Seating(name="two processes on CPUs, gloo", needs=0, processes=2)
CPU = Seating(name="all stages in one process, CPU", needs=0, processes=1)
SEATINGS = (NCCL, SHARED, ALONE, SOCKETS, CPUS, CPU)


def here() -> list[Seating]:
    """The seatings of this machine: those on GPUs, or if it has none, those on CPUs."""
    gpus = torch.cuda.is_available()
    return [seating for seating in SEATINGS if seating.exists and seating.on_gpu == gpus]


def _main(rank: int, seating: Seating, folder: str, calls: Sequence[Callable[[torch.device], Any]]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = seating.device(rank)
    if seating.hosts:
        os.environ["NCCL_HOSTID"] = f"host {rank}"
    open_queues()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        seating.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=seating.world_size,
        device_id=device if seating.backend == "nccl" else None,  # as Lightning does; communicators are then split
    )
    for number, call in enumerate(calls):
        new = Path(folder, f"{number}-{rank}.new")
        new.write_bytes(pickle.dumps(call(device)))
        new.rename(new.with_suffix(""))
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
