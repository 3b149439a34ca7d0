"""Estimates compared with real runs: the examples as pipelines of two processes, with roofline and measured costs.

    python benchmarks/estimate.py [--rounds 20]

The table has the step time (all forwards and backwards of a mini-batch, without the optimizer), simulated and executed
by real processes.

"roofline, preset" knows only that this machine has CPUs; "roofline, calibrated" measured its arithmetic, memory and
cost of calling an operator; "measured" timed every block of the model, alone in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from examples_by_name import EXAMPLES, model_and_batch
from processes import load, run

from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.cluster import Cluster, Device, preset_cluster
from lightning_gpp.costs.model import CostModel, Roofline
from lightning_gpp.measure.calibrate import calibrate
from lightning_gpp.measure.costs import measure_costs
from lightning_gpp.plan import Plan
from lightning_gpp.planning import estimate, manual
from lightning_gpp.runtime import DistributedTransport, Executor, Mesh, RandomStreams, pairs_of
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import simulate
from lightning_gpp.stages import Pipeline, build

NUM_MICRO_BATCHES = 4
STEPS_PER_ROUND = 4
PLACEMENTS = {
    "two_tower": [["text_tower"], ["image_tower", "head"]],
    "feature_towers": [["mean_tower", "error_tower"], ["worst_tower", "trunk"]],
    "gpt_text": [["embedding", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "norm", "head"]],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An example's plan, and the seconds of a step that cost models predict for it."""

    name: str
    plan: Plan
    predictions: dict[str, float]


# -- predictions ------------------------------------------------------------------------------------------------------


def case_of(name: str, machine: Device) -> Case:
    model, batch = model_and_batch(name)
    captured = capture_step(model, batch)
    plan = plan_of(name, captured)
    size = plan.stages[0].micro_batch_size
    measured = measure_costs(captured, model, batch, device=machine, sizes=(size, captured.batch_size))
    roofline = Roofline(captured.graph)
    host = preset_cluster("cpu_host", num_devices=plan.num_devices)
    here = replace(host, devices=(machine,) * plan.num_devices)
    sources: tuple[tuple[str, CostModel, Cluster], ...] = (
        ("roofline, preset", roofline, host),
        ("roofline, calibrated", roofline, here),
        ("measured", measured, here),
    )
    predictions = {label: predicted(captured, plan, cluster, costs) for label, costs, cluster in sources}
    return Case(name=name, plan=plan, predictions=predictions)


def plan_of(name: str, captured: Capture) -> Plan:
    placement = [{"modules": modules} for modules in PLACEMENTS[name]]
    return manual(captured.graph, placement, batch_size=captured.batch_size, num_micro_batches=NUM_MICRO_BATCHES)


def predicted(captured: Capture, plan: Plan, cluster: Cluster, costs: CostModel) -> float:
    return simulate(compile_program(plan), estimate(captured.graph, plan, cluster, costs)).makespan


# -- reality ----------------------------------------------------------------------------------------------------------


class Runner:
    """Runs one example's plan on this rank."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank = rank
        self.model, self.batch = model_and_batch(name)
        captured = capture_step(self.model, self.batch)
        self.plan, self.batch_size = plan_of(name, captured), captured.batch_size
        vars(self.model).update(log=lambda *_, **__: None)  # there is no trainer
        self.pipeline: Pipeline = build(captured, self.plan, self.model)
        self.transport = DistributedTransport(Mesh(self.plan.num_devices, 1, rank), pairs_of(self.plan))

    def executor(self) -> Executor:
        return Executor(
            compile_program(self.plan),
            self.rank,
            stages=self.pipeline.stages,
            slots=self.pipeline.slots,
            transport=self.transport,
            source=self.pipeline.source if self.rank == 0 else None,
            streams=RandomStreams(0),
        )

    def step(self, executor: Executor) -> float:
        """Seconds from the first start to the last end of all processes."""
        self.model.zero_grad()
        if self.rank == 0:
            self.pipeline.step.begin(self.batch, lambda samples: self.model.training_step(samples, 0), seed=0)
        dist.barrier()
        start = time.monotonic()
        executor.run(loss_weight=1 / self.batch_size)
        bounds = torch.tensor([-start, time.monotonic()], dtype=torch.float64)
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        self.pipeline.step.end()
        return float(bounds.sum())


def measure(rank: int, cases: Sequence[Case], rounds: int) -> None:
    """Measure all cases in turn, so that other work on the machine affects them equally."""
    runners = [Runner(rank, case.name) for case in cases]
    executors = [runner.executor() for runner in runners]
    steps: list[list[float]] = [[] for _ in cases]
    for number in range(1 + rounds):
        for index, runner in enumerate(runners):
            seconds = [runner.step(executors[index]) for _ in range(STEPS_PER_ROUND)]
            steps[index] += seconds if number else []  # the first round warms up
    if rank == 0:
        report(cases, steps)


# -- tables -----------------------------------------------------------------------------------------------------------


def report(cases: Sequence[Case], steps: Sequence[Sequence[float]]) -> None:
    print_table(
        "model | micro-batches | costs | step predicted, ms | executed: best, ms | error | median, ms | error",
        [row for pair in zip(cases, steps, strict=True) for row in step_rows(*pair)],
    )


def step_rows(case: Case, steps: Sequence[float]) -> list[list[str]]:
    best, median = min(steps), statistics.median(steps)
    sizes = f"{NUM_MICRO_BATCHES} of {case.plan.stages[0].micro_batch_size}"
    return [
        [case.name, sizes, label, ms(seconds), ms(best), error(seconds, best), ms(median), error(seconds, median)]
        for label, seconds in case.predictions.items()
    ]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def error(predicted: float, actual: float) -> str:
    return f"{predicted / actual - 1:+.0%}"


def print_table(header: str, rows: Sequence[Sequence[str]]) -> None:
    print(f"| {header} |\n" + "|---" * (header.count("|") + 1) + "|")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help=f"of {STEPS_PER_ROUND} steps of every example")
    arguments = parser.parse_args()
    machine = calibrate(torch.device("cpu"))
    cases = [case_of(name, machine) for name in EXAMPLES]
    print(f"{load()}; 2 processes with one thread each; {arguments.rounds * STEPS_PER_ROUND} steps\n")
    run(2, measure, cases, arguments.rounds)


if __name__ == "__main__":
    main()
