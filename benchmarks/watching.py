"""Cost of watching per training step: clocks, the comparison of devices, the stop flag, heartbeats with hang reports.

    chrt -r 10 python -m benchmarks.watching

Two gloo processes. Each part is measured alone and repeated, because a hundredth of a step is less than the differences
between steps. The figures are those of a rank that waits for 64 messages in a step.
"""

from __future__ import annotations

import statistics
import threading
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from benchmarks.overhead import executor_of, free_port, layers, plan_of
from lightning_gpp import Options
from lightning_gpp.failure.hangs import Activity
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.runtime import Executor, Mesh
from lightning_gpp.schedules import compile_program
from lightning_gpp.schedules.program import Op
from lightning_gpp.training.control import Control
from lightning_gpp.training.host import Job
from lightning_gpp.training.stragglers import PERIOD, Stragglers

STEP = 0.020
"""Seconds of the step that the costs are compared with."""
WAITS = 64
"""Messages that a rank in the middle receives in a step of 32 micro-batches."""
REPETITIONS = 5
IDLE = 10.0
"""Seconds in which only the watch runs."""


def median_of(function: Callable[[], float]) -> float:
    return statistics.median(function() for _ in range(REPETITIONS))


def repeated(times: int, function: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - start) / times


def clocks(executor: Executor) -> float:
    """Seconds per step of timing all waits, by the difference to waits without a clock."""
    plain = lambda: None  # noqa: E731
    timed = executor._timed(0, plain)
    executor.waits.clear()
    return WAITS * (repeated(100_000, timed) - repeated(100_000, plain))


def notes(executor: Executor, job: Job) -> float:
    """Seconds per step of noting its waits, with the comparison after 500 of them."""
    waiting = [position for position, each in enumerate(executor._instructions) if each.op is Op.WAIT]
    executor.waits[:] = [(waiting[i % len(waiting)], 1e-5) for i in range(WAITS)]
    stragglers = Stragglers(job, dict)
    dist.barrier()
    return repeated(PERIOD, lambda: stragglers.note(executor))


def flags(control: Control) -> float:
    """Seconds per step of telling the stop flag to the other rank, or of taking it."""
    if control.rank != 0:
        dist.barrier()
    seconds = repeated(200, lambda: control.relay(0))
    if control.rank == 0:
        dist.barrier()
    return seconds


def heartbeats(executor: Executor) -> float:
    """Processor seconds per step of the watching thread."""
    activity = Activity(describe=executor.describe, wait=executor.wait)
    with FailureMonitor(rank=dist.get_rank(), world_size=2, activity=activity, hang=1620.0):
        (thread,) = (each for each in threading.enumerate() if each.name == "gpp-failure-monitor")
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        start, busy = time.perf_counter(), time.clock_gettime(clock)
        time.sleep(IDLE)
        part = (time.clock_gettime(clock) - busy) / (time.perf_counter() - start)
    return part * STEP


def measure(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    control = Control(Mesh(2, 1, rank))
    job = Job(module=nn.Identity(), control=control, options=Options(), device=torch.device("cpu"), seed=0)
    executor = executor_of(rank, compile_program(plan_of("1f1b", 32, send_data=False)), (layers(0), layers(1)))
    executor.run(loss_weight=1 / 32)
    figures = {
        "clocks at 64 waits": median_of(lambda: clocks(executor)),
        "notes, and a comparison every 500 steps": median_of(lambda: notes(executor, job)),
        "stop flag": median_of(lambda: flags(control)),
        "heartbeats and hang reports": heartbeats(executor),
    }
    ranks: list[dict[str, float]] = control.gather(figures)
    if rank == 0:
        print(table({name: max(each[name] for each in ranks) for name in figures}))
    dist.destroy_process_group()


def table(figures: dict[str, float]) -> str:
    rows = {**figures, "together": sum(figures.values())}
    lines = [f"| {name} | {seconds * 1e6:.1f} | {100 * seconds / STEP:.2f} % |" for name, seconds in rows.items()]
    return "\n".join([f"| on the slower rank | us per step | of {STEP * 1e3:.0f} ms |", "|---|---|---|", *lines])


if __name__ == "__main__":
    multiprocessing.spawn(measure, (free_port(),), nprocs=2)
