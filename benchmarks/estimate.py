"""Estimates compared with real runs: the examples as pipelines of two processes, with roofline and measured costs.

    python benchmarks/estimate.py [--rounds 20]

First table: step time (all forwards and backwards of a mini-batch, without the optimizer), simulated and executed by
real processes. Second table: actions of the fastest traced step, means over the micro-batches, to separate errors of
the costs from errors of the simulation.

"roofline, preset" knows only that this machine has CPUs; "roofline, calibrated" measured its arithmetic, memory and
cost of calling an operator; "measured" timed every block of the model, alone in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
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
from lightning_gpp.schedules import Kind, compile_program
from lightning_gpp.simulation import StageCosts, simulate
from lightning_gpp.stages import Pipeline, build

NUM_MICRO_BATCHES = 4
STEPS_PER_ROUND = 4
PLACEMENTS = {
    "two_tower": [["text_tower"], ["image_tower", "head"]],
    "feature_towers": [["mean_tower", "error_tower"], ["worst_tower", "trunk"]],
    "gpt_text": [["embedding", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "norm", "head"]],
}
Actions = dict[tuple[int, Kind], list[float]]
"""Seconds of all actions, by stage and kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction of a cost model for a plan."""

    costs: str
    seconds: float
    actions: dict[tuple[int, Kind], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An example's plan, and the predictions for it."""

    name: str
    plan: Plan
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements: seconds of steps, and of actions in the fastest step."""

    steps: list[float]
    actions: dict[tuple[int, Kind], float]


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
    predictions = tuple(predicted(label, captured, plan, cluster, costs) for label, costs, cluster in sources)
    return Case(name=name, plan=plan, predictions=predictions)


def plan_of(name: str, captured: Capture) -> Plan:
    placement = [{"modules": modules} for modules in PLACEMENTS[name]]
    return manual(captured.graph, placement, batch_size=captured.batch_size, num_micro_batches=NUM_MICRO_BATCHES)


def predicted(label: str, captured: Capture, plan: Plan, cluster: Cluster, costs: CostModel) -> Prediction:
    stage_costs = estimate(captured.graph, plan, cluster, costs)
    timeline = simulate(compile_program(plan), stage_costs)
    return Prediction(costs=label, seconds=timeline.makespan, actions=actions_of(plan, stage_costs))


def actions_of(plan: Plan, costs: StageCosts) -> dict[tuple[int, Kind], float]:
    seconds = {}
    for index, (stage, cost) in enumerate(zip(plan.stages, costs.stages, strict=True)):
        seconds[index, Kind.FORWARD] = cost.forward.at(stage.micro_batch_size)
        seconds[index, Kind.BACKWARD] = cost.backward.at(stage.micro_batch_size)
    return seconds


# -- reality ----------------------------------------------------------------------------------------------------------


class Runner:
    """Runs one example's plan on this rank."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank = rank
        self.model, self.batch = model_and_batch(name)
        captured = capture_step(self.model, self.batch)
        self.plan, self.batch_size = plan_of(name, captured), captured.batch_size
        silence(self.model)
        self.pipeline: Pipeline = build(captured, self.plan, self.model)
        self.transport = DistributedTransport(Mesh(self.plan.num_devices, 1, rank), pairs_of(self.plan))

    def executor(self, trace: bool = False) -> Executor:
        return Executor(
            compile_program(self.plan),
            self.rank,
            stages=self.pipeline.stages,
            slots=self.pipeline.slots,
            transport=self.transport,
            source=self.pipeline.source if self.rank == 0 else None,
            streams=RandomStreams(0),
            trace=trace,
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


def silence(model: L.LightningModule) -> None:
    """Replace logging, because there is no trainer."""
    vars(model).update(log=lambda *_, **__: None)


def measure(rank: int, cases: Sequence[Case], rounds: int) -> None:
    """Measure all cases in turn, so that other work on the machine affects them equally."""
    runners = [Runner(rank, case.name) for case in cases]
    plain = [runner.executor() for runner in runners]
    traced = [runner.executor(trace=True) for runner in runners]
    steps: list[list[float]] = [[] for _ in cases]
    best: list[tuple[float, Actions]] = [(float("inf"), {}) for _ in cases]
    for number in range(1 + rounds):
        for index, runner in enumerate(runners):
            seconds = [runner.step(plain[index]) for _ in range(STEPS_PER_ROUND)]
            steps[index] += seconds if number else []  # the first round warms up
            best[index] = min(best[index], traced_step(runner, traced[index]), key=lambda pair: pair[0])
    measured = [Measured(steps=steps[index], actions=gathered(best[index][1])) for index in range(len(cases))]
    if rank == 0:
        report(cases, measured)


def traced_step(runner: Runner, executor: Executor) -> tuple[float, Actions]:
    """Seconds of a step, and of its actions on this rank, without waiting for messages."""
    seconds, actions = runner.step(executor), defaultdict(list)
    for action, start, stop in executor.timings:
        if action.kind is not Kind.DATA:
            actions[action.stage, action.kind].append(stop - start)
    return seconds, dict(actions)


def gathered(mine: Actions) -> dict[tuple[int, Kind], float]:
    """Means over the micro-batches of all ranks."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return {key: statistics.mean(values) for actions in everybody for key, values in actions.items()}


# -- tables -----------------------------------------------------------------------------------------------------------


def report(cases: Sequence[Case], measured: Sequence[Measured]) -> None:
    print_table(
        "model | micro-batches | costs | step predicted, ms | executed: best, ms | error | median, ms | error",
        [row for pair in zip(cases, measured, strict=True) for row in step_rows(*pair)],
    )
    labels = [prediction.costs for prediction in cases[0].predictions]
    print_table(
        "model | stage | action | executed, ms | " + " | ".join(f"{label}, ms | error" for label in labels),
        [row for pair in zip(cases, measured, strict=True) for row in action_rows(*pair)],
    )


def step_rows(case: Case, measured: Measured) -> list[list[str]]:
    best, median = min(measured.steps), statistics.median(measured.steps)
    sizes = f"{NUM_MICRO_BATCHES} of {case.plan.stages[0].micro_batch_size}"
    return [
        [case.name, sizes, prediction.costs, ms(prediction.seconds)]
        + [ms(best), error(prediction.seconds, best), ms(median), error(prediction.seconds, median)]
        for prediction in case.predictions
    ]


def action_rows(case: Case, measured: Measured) -> list[list[str]]:
    rows = []
    for stage, kind in sorted(measured.actions, key=lambda key: (key[0], key[1] is Kind.BACKWARD)):
        seconds = measured.actions[stage, kind]
        cells = [case.name, case.plan.stages[stage].name, kind.name.lower(), ms(seconds)]
        for prediction in case.predictions:
            cells += [ms(prediction.actions[stage, kind]), error(prediction.actions[stage, kind], seconds)]
        rows.append(cells)
    return rows


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
