"""1F1B with and without a flush between mini-batches, on devices that sleep instead of computing.

    python benchmarks/schedules/unflushed.py [--devices 8] [--milliseconds 20]

The models and stages are those of `emulated.py`. Both programs train mini-batches in a row without a barrier; a figure
is the time between two ends of mini-batches on one rank, far enough from fill and drain, divided by the mini-batches in
between. Simulated figures are the step time of one mini-batch with a flush, and without one the difference between two
runs, one of which is a mini-batch longer. (M + D - 1) / M is the published ratio of the two for M micro-batches and a
pipeline of depth D. There are no optimizer steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from emulated import Case, cases, check_peaks, executor_of
from processes import load, run

from lightning_gpp.runtime import Executor
from lightning_gpp.schedules import Program, compile_program
from lightning_gpp.schedules.continuous import continuous_program, unrolled
from lightning_gpp.simulation import simulate

SCHEDULE = "1f1b"
EXECUTED = ("best", "median", "error")
RATIOS = ("(M+D-1)/M", "flushed / continuous", "difference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds per mini-batch of a program: simulated, and executed in each repetition."""

    simulated: float
    executed: Sequence[float]

    @property
    def best(self) -> float:
        return min(self.executed)

    @property
    def median(self) -> float:
        return statistics.median(self.executed)

    def cells(self) -> str:
        seconds = " | ".join(f"{1e3 * value:.1f}" for value in (self.simulated, self.best, self.median))
        return f"{seconds} | {self.best / self.simulated - 1:+.1%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The length of a measurement: mini-batches in a row, and repetitions."""

    mini_batches: int
    repetitions: int


def measure(rank: int, counts: Sequence[int], length: Length, seconds: float) -> None:
    num_devices = dist.get_world_size()
    if rank == 0:
        print(f"{num_devices} processes on {load()}; ms per mini-batch\n")
        print(
            "| model | M | D | lead | flushed: simulated | best | median | error | continuous: simulated | best |",
            end="",
        )
        print(" median | error | (M+D-1)/M | flushed / continuous | difference |")
        print("|---" * 15 + "|", flush=True)
    for count in counts:
        for entry in cases(SCHEDULE, num_devices, count, seconds):
            row = compared(rank, entry, length)
            if rank == 0:
                print(row, flush=True)


def compared(rank: int, entry: Case, length: Length) -> str:
    plan = entry.plan
    program = continuous_program(plan)
    flushed, continuous = pace(rank, compile_program(plan), entry, length), pace(rank, program, entry, length)
    count, depth = plan.batch_size, plan.depth
    published, gained = (count + depth - 1) / count, flushed.best / continuous.best
    columns = f"{entry.model} | {count} | {depth} | {program.lead} | {flushed.cells()} | {continuous.cells()}"
    return f"| {columns} | {published:.3f} | {gained:.3f} | {gained / published - 1:+.1%} |"


def pace(rank: int, program: Program, entry: Case, length: Length) -> Pace:
    executor = executor_of(rank, program)
    number = length.mini_batches + 2 * program.lead + 1
    executed = [in_a_row(executor, number) for _ in range(length.repetitions + 1)]
    timelines = [simulate(written_out(program, n), entry.costs) for n in (number - 1, number)]
    check_peaks(executor, timelines[1], entry.model)
    makespans = [timeline.makespan for timeline in timelines]
    simulated = makespans[1] - makespans[0] if program.ahead else makespans[1]
    return Pace(simulated=simulated, executed=executed[1:])


def written_out(program: Program, number: int) -> Program:
    return unrolled(program, number) if program.ahead else program


def in_a_row(executor: Executor, number: int) -> float:
    """Seconds per mini-batch of `number` in a row, without those in which the pipeline fills or drains."""
    program, ends = executor.program, list[float]()
    dist.barrier()
    for step in range(number):
        segment = (0, number) if program.ahead else (step, step + 1)
        executor.run(loss_weight=1 / program.batch_size, step=step, first=segment[0], last=segment[1])
        ends.append(time.perf_counter())
    steady = ends[program.lead : number - program.lead]
    return (steady[-1] - steady[0]) / (len(steady) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument(
        "--micro-batches", type=int, nargs="*", help="as many as devices and twice as many unless given"
    )
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of every action")
    parser.add_argument("--mini-batches", type=int, default=6, help="in a row")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    counts = arguments.micro_batches or [arguments.devices, 2 * arguments.devices]
    length = Length(mini_batches=arguments.mini_batches, repetitions=arguments.repetitions)
    run(arguments.devices, measure, counts, length, arguments.milliseconds / 1000)


if __name__ == "__main__":
    main()
