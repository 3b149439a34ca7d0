"""Prediction with and without a flush between mini-batches, on devices that sleep instead of computing.

    python benchmarks/schedules/streamed.py [--devices 8] [--milliseconds 20]

A chain, and two towers that join, are evaluated by an `Engine` in a plain loop: including capture, data, messages and
communication between ranks. A figure is the time between two ends of mini-batches on the rank that runs the step, far
enough from fill and drain, divided by the mini-batches in between. Simulated figures are the step time of one
mini-batch with a flush, and the period without one. (M + D - 1) / M is the ratio of the two for M micro-batches and a
depth of D.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp import Engine, Options, initialize
from lightning_gpp.graph import Affine
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.schedules import compile_program
from lightning_gpp.schedules.continuous import streaming_program
from lightning_gpp.simulation import StageCost, StageCosts, simulate, steady_seconds

sys.path.insert(0, str(Path(__file__).parents[1]))
from processes import load, run  # noqa: E402
from sleeping import WIDTH  # noqa: E402

STEP_NAME = "validation_step"


class Sleeping(nn.Module):
    """A product with a parameter that sleeps."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.eye(WIDTH)), seconds

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and type(x) is Tensor:  # not while the step is recorded
            time.sleep(self.seconds)
        return nn.functional.linear(x, self.weight)


class Model(nn.Module):
    """Layers in towers that join in the last layer; one tower is a chain."""

    def __init__(self, num_layers: int, num_towers: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeping(seconds) for _ in range(num_layers))
        self.length = (num_layers - 1) // num_towers
        self.num_towers = num_towers

    def forward(self, x: Tensor) -> Tensor:
        ends = [self.tower(x, tower) for tower in range(self.num_towers)]
        return self.layers[-1](torch.stack(ends).sum(0))

    def tower(self, x: Tensor, number: int) -> Tensor:
        for layer in self.layers[number * self.length : (number + 1) * self.length]:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A measurement: towers, micro-batches, seconds of a forward, mini-batches in a row, repetitions."""

    num_towers: int
    num_micro_batches: int
    seconds: float
    mini_batches: int
    repetitions: int


def measure(rank: int, cases: Sequence[Case]) -> None:
    if rank == 0:
        print(f"{dist.get_world_size()} processes on {load()}; ms per mini-batch\n")
        print(
            "| towers | M | D | read ahead | flushed: simulated | best | median | streamed: simulated | best |", end=""
        )
        print(" median | error | (M+D-1)/M | flushed / streamed | difference |")
        print("|---" * 14 + "|", flush=True)
    for case in cases:
        row = compared(case)
        if rank == 0:
            print(row, flush=True)


def compared(case: Case) -> str:
    flushed, plan, _ = paces(case, streaming=False)
    streamed, _, ahead = paces(case, streaming=True)
    count, depth = case.num_micro_batches, plan.depth - 1  # the step is a stage of its own, which takes no time
    costs = costs_of(plan, case.seconds)
    simulated = simulate(compile_program(plan, training=False), costs).makespan
    period = steady_seconds(streaming_program(plan), costs)
    published, gained = (count + depth - 1) / count, min(flushed) / min(streamed)
    cells = [simulated, min(flushed), statistics.median(flushed), period, min(streamed), statistics.median(streamed)]
    figures = " | ".join(f"{1e3 * value:.1f}" for value in cells)
    error = f"{min(streamed) / period - 1:+.1%} | {published:.3f} | {gained:.3f} | {gained / published - 1:+.1%}"
    return f"| {case.num_towers} | {count} | {depth} | {ahead} | {figures} | {error} |"


def paces(case: Case, *, streaming: bool) -> tuple[list[float], Plan, int]:
    """Seconds per mini-batch in every repetition, the plan of the evaluation, and mini-batches read ahead."""
    num_devices = dist.get_world_size()
    module = Model(num_devices, case.num_towers, case.seconds)
    batch = torch.ones(case.num_micro_batches, WIDTH)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    stages = [{"modules": [f"layers.{i}"], "devices": [num_devices - 1 - i]} for i in range(num_devices)]
    stages[-1]["modules"] = [f"layers.{num_devices - 1}", STEP]
    options = Options(stages=stages, micro_batch_size=1, streaming=streaming, self_check=False)
    with initialize(module, optimizer, batch, step=loss_of, options=options) as engine, torch.no_grad():
        list(ends(engine, [batch, batch]))  # captures and makes the programs
        found = [pace(engine, [batch] * case.mini_batches) for _ in range(case.repetitions)]
        assert engine.current is not None
        return found, engine.current.plan, engine.ahead(STEP_NAME)


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).mean()


def pace(engine: Engine, batches: Sequence[Tensor]) -> float:
    dist.barrier()
    margin = 1 + engine.ahead(STEP_NAME)
    steady = list(ends(engine, batches))[margin : len(batches) - margin]
    return (steady[-1] - steady[0]) / (len(steady) - 1)


def ends(engine: Engine, batches: Sequence[Tensor]) -> Iterator[float]:
    for batch in engine.feed(batches, STEP_NAME):
        engine.evaluate(batch, step=STEP_NAME)
        yield time.perf_counter()


def costs_of(plan: Plan, seconds: float) -> StageCosts:
    stages = (StageCost(forward=Affine() if stage.modules == (STEP,) else Affine(0, seconds)) for stage in plan.stages)
    return StageCosts(stages=tuple(stages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of every forward")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    cases = [
        Case(
            num_towers=num_towers,
            num_micro_batches=count,
            seconds=arguments.milliseconds / 1000,
            mini_batches=2 * (2 * arguments.devices // count + 2) + 12,
            repetitions=arguments.repetitions,
        )
        for num_towers in (1, 2)
        for count in arguments.micro_batches
        if (arguments.devices - 1) % num_towers == 0
    ]
    run(arguments.devices, measure, cases)


if __name__ == "__main__":
    main()
