"""Executed and simulated steps of stages that recompute blocks, and of stages with slack, on layers that sleep.

    python benchmarks/schedules/kept_or_repeated.py [--milliseconds 20]

Three gloo processes run a chain of three stages of four layers. A layer sleeps in the forward, and twice as long in
the backward. Costs are measured; the plan, the simulation and the execution are those of every run. The table has
best and median of the repetitions. All variants must give the gradients of the first one bit for bit, and hold the
micro-batches that the simulator promises.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.cluster import preset_cluster
from lightning_gpp.measure.costs import measure_costs
from lightning_gpp.plan import Plan
from lightning_gpp.planning import estimate, manual
from lightning_gpp.runtime import DistributedTransport, Executor, Mesh, pairs_of
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import Timeline, simulate
from lightning_gpp.stages import build

sys.path.insert(0, str(Path(__file__).parents[1]))
from processes import load, run  # noqa: E402

WIDTH: Final = 16
STAGES: Final = ("first", "second", "third")
LAYERS: Final = 4
NUM_MICRO_BATCHES: Final = 8
SAMPLES: Final = 2
"""Of a micro-batch."""

VARIANTS: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "everything is kept": ({}, {}, {}),
    "one block of the first": ({"recompute": ["first.1"]}, {}, {}),
    "two blocks of the first two": ({"recompute": ["first.0", "first.1"]}, {"recompute": ["second.2", "second.3"]}, {}),
    "the first two stages": ({"recompute": True}, {"recompute": True}, {}),
    "slack 1": ({"slack": 1}, {"slack": 1}, {}),
    "slack 2": ({"slack": 2}, {"slack": 2}, {}),
}
"""What differs from the plan of the first, by stage."""


class Nap(torch.autograd.Function):
    """A product that takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        time.sleep(0 if x.is_meta else seconds)
        ctx.save_for_backward(x, weight)
        ctx.seconds = seconds
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        time.sleep(2 * ctx.seconds)
        return gradient @ weight.T, x.T @ gradient, None


class Layer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.01 * torch.randn(WIDTH, WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Nap.apply(x, self.weight, self.seconds)


class Sleepers(L.LightningModule):
    """A chain of three stages."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        for name in STAGES:
            setattr(self, name, nn.Sequential(*(Layer(seconds) for _ in range(LAYERS))))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.third(self.second(self.first(batch))).square().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A variant's plan and its simulated step."""

    name: str
    plan: Plan
    timeline: Timeline


def cases_of(captured: Capture, model: Sleepers, batch: Tensor) -> list[Case]:
    cluster = preset_cluster("cpu_host", num_devices=len(STAGES))
    with tempfile.TemporaryDirectory() as cache:
        sizes = (SAMPLES, len(batch))
        costs = measure_costs(captured, model, batch, device=cluster.devices[0], sizes=sizes, cache=cache)
    found = []
    for name, changes in VARIANTS.items():
        plan = plan_of(captured, changes)
        timeline = simulate(compile_program(plan), estimate(captured.graph, plan, cluster, costs))
        found.append(Case(name=name, plan=plan, timeline=timeline))
    return found


def plan_of(captured: Capture, changes: Sequence[Mapping[str, Any]]) -> Plan:
    modules = [["first"], ["second"], ["third", "@step"]]
    stages = [{"modules": names, **more} for names, more in zip(modules, changes, strict=True)]
    return manual(captured.graph, stages, batch_size=captured.batch_size, num_micro_batches=NUM_MICRO_BATCHES)


def batch_of() -> Tensor:
    return torch.randn(NUM_MICRO_BATCHES * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))


def measure(rank: int, cases: Sequence[Case], seconds: float, repetitions: int) -> None:
    model, batch = Sleepers(seconds), batch_of()
    captured = capture_step(model, batch)
    transport = DistributedTransport(Mesh(len(STAGES), 1, rank), pairs_of(cases[0].plan))
    expected: list[Tensor] = []
    for case in cases:
        pipeline = build(captured, case.plan, model)
        executor = Executor(
            compile_program(case.plan),
            rank,
            stages=pipeline.stages,
            slots=pipeline.slots,
            transport=transport,
            source=pipeline.source,
        )
        times = [step(executor, pipeline.step, model, batch) for _ in range(repetitions + 1)]
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        expected = expected or gradients
        check(case, executor, gradients, expected)
        if rank == 0:
            print(row(case, times[1:]), flush=True)


def step(executor: Executor, users: Any, model: Sleepers, batch: Tensor) -> float:
    """Seconds from the first start to the last end of all processes."""
    model.zero_grad()
    users.begin(batch, lambda samples: model.training_step(samples, 0), seed=0)
    dist.barrier()
    start = time.monotonic()
    executor.run(loss_weight=1 / len(batch))
    bounds = torch.tensor([-start, time.monotonic()], dtype=torch.float64)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    users.end()
    return float(bounds.sum())


def check(case: Case, executor: Executor, gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Stop if a variant gives other gradients, or holds other numbers of micro-batches than promised."""
    if not all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True)):
        raise RuntimeError(f"{case.name}: the gradients differ from those of the first variant")
    peaks = executor.peak_in_flight
    promised = {stage: case.timeline.peak_in_flight[stage] for stage in peaks}
    if peaks != promised:
        raise RuntimeError(f"{case.name}: peaks in flight {peaks}, promised {promised}")


def row(case: Case, times: Sequence[float]) -> str:
    goal, best, median = case.timeline.makespan, min(times), statistics.median(times)
    held = "/".join(str(case.timeline.peak_in_flight[stage]) for stage in range(len(STAGES)))
    seconds = " | ".join(f"{value * 1e3:.0f}" for value in (goal, best, median))
    return f"| {case.name} | {held} | {seconds} | {best / goal - 1:+.1%} | {median / goal - 1:+.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a layer's forward")
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    seconds = given.milliseconds / 1e3
    model, batch = Sleepers(seconds), batch_of()
    cases = cases_of(capture_step(model, batch), model, batch)
    print(f"{len(STAGES)} processes on {load()}, {NUM_MICRO_BATCHES} micro-batches\n")
    print("| recomputed | in flight | simulated, ms | best, ms | median, ms | best | median |\n" + "|---" * 7 + "|")
    run(len(STAGES), measure, cases, seconds, given.repetitions)


if __name__ == "__main__":
    main()
