"""The simulator compared with real runs, with replayed compute: stages sleep for their simulated durations.

    python benchmarks/replay.py [--processes 4 8] [--steps 5]

Many processes share few cores here, so real computing would not run in parallel, but sleeping does. Everything else is
real: the verified program, the executor, autograd, gloo between processes; messages are small. So the table shows the
accuracy of the simulated order, waiting and overlap, but not of compute costs.

Durations of actions are the roofline model's, scaled so that the shortest takes 20 ms; if the step would then be too
long, it is scaled to LONGEST_STEP, and shorter actions take 20 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from processes import load, run
from torch import Tensor, nn

from lightning_gpp.capture import capture_step
from lightning_gpp.cluster import preset_cluster
from lightning_gpp.costs.model import Roofline
from lightning_gpp.graph import Affine, TensorSpec
from lightning_gpp.plan import SOURCE, STEP, Edge, Plan, Stage
from lightning_gpp.planning import estimate, manual
from lightning_gpp.runtime import LOSS, DistributedTransport, Executor, Mesh, MicroBatch, Slot, pairs_of
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCost, StageCosts, simulate

SHORTEST_ACTION = 0.02
LONGEST_STEP = 1.5
NUM_MICRO_BATCHES = 8
WIDTH = 4
MESSAGE_BYTES = Affine(4 * WIDTH, 0)


def halves(block: str) -> list[list[str]]:
    return [
        [f"{block}.attention_norm", f"{block}.attention"],
        [f"{block}.perceptron_norm", f"{block}.perceptron"],
    ]


def layers(tower: str, *indices: int) -> list[str]:
    return [f"{tower}.{index}" for index in indices]


TEXT = "text_tower"
IMAGE = "image_tower.layers"
TOWERS = ("mean_tower", "error_tower", "worst_tower")
PLACEMENTS: dict[tuple[str, int], list[list[str]]] = {
    ("two_tower", 4): [
        ["image_tower"],
        [f"{TEXT}.embedding", f"{TEXT}.blocks.0"],
        [f"{TEXT}.blocks.1", f"{TEXT}.norm"],
        ["head"],
    ],
    ("two_tower", 8): [
        layers(IMAGE, *range(5)),
        [*layers(IMAGE, *range(5, 10)), "image_tower.projection"],
        [f"{TEXT}.embedding"],
        *halves(f"{TEXT}.blocks.0"),
        *halves(f"{TEXT}.blocks.1"),
        [f"{TEXT}.norm", "head"],
    ],
    ("feature_towers", 4): [*([tower] for tower in TOWERS), ["trunk"]],
    ("feature_towers", 8): [
        *(layers(tower, *part) for tower in TOWERS for part in (range(5), range(5, 9))),
        layers("trunk", 0, 1),
        layers("trunk", 2),
    ],
    ("gpt_text", 4): [["embedding", "blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "norm", "head"]],
    ("gpt_text", 8): [
        ["embedding", *halves("blocks.0")[0]],
        halves("blocks.0")[1],
        *halves("blocks.1"),
        *halves("blocks.2"),
        halves("blocks.3")[0],
        [*halves("blocks.3")[1], "norm", "head"],
    ],
}
BRANCHES: dict[int, tuple[tuple[int, int], ...]] = {
    4: ((0, 1), (0, 2), (1, 3), (2, 3)),
    8: ((0, 1), (1, 2), (2, 7), (3, 4), (4, 5), (5, 6), (6, 7)),
}
"""Edges between the stages of a model that consists of branches only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan with small messages, and the seconds of its stages."""

    name: str
    plan: Plan
    costs: StageCosts


def example(name: str, num_devices: int) -> Case:
    from examples_by_name import model_and_batch

    model, batch = model_and_batch(name)
    graph = capture_step(model, batch)
    placement = [{"modules": modules} for modules in PLACEMENTS[name, num_devices]]
    plan = manual(graph.graph, placement, batch_size=graph.batch_size, num_micro_batches=NUM_MICRO_BATCHES)
    cluster = preset_cluster("cpu_host", num_devices=num_devices)
    costs = estimate(graph.graph, plan, cluster, Roofline(graph.graph))
    plan = replace(plan, edges=tuple(replace(edge, bytes=MESSAGE_BYTES) for edge in plan.edges))
    return Case(name=name, plan=plan, costs=scaled(plan, costs))


def branches(num_devices: int, schedule: str) -> Case:
    """The model of branches; a forward takes 20 ms, a backward twice that."""
    pairs = BRANCHES[num_devices]
    firsts = sorted(set(range(num_devices)) - {dst for _, dst in pairs})
    stages = tuple(
        Stage(
            name=f"s{index}",
            modules=(f"s{index}",) if index < num_devices - 1 else (STEP,),
            devices=(num_devices - 1 - index,),
            micro_batch_size=1,
        )
        for index in range(num_devices)
    )
    sources = (Edge(src=SOURCE, dst=stage, bytes=MESSAGE_BYTES, differentiable=False) for stage in firsts)
    edges = (*sources, *(Edge(src=src, dst=dst, bytes=MESSAGE_BYTES) for src, dst in pairs))
    plan = Plan(stages=stages, edges=edges, batch_size=NUM_MICRO_BATCHES, schedule=schedule)
    cost = StageCost(forward=Affine(0, SHORTEST_ACTION), backward=Affine(0, 2 * SHORTEST_ACTION))
    cluster = preset_cluster("cpu_host", num_devices=num_devices)
    return Case(name="branches", plan=plan, costs=StageCosts(stages=(cost,) * num_devices, cluster=cluster))


def scaled(plan: Plan, costs: StageCosts) -> StageCosts:
    """The costs of a full micro-batch, scaled, as constants."""
    pairs = [
        (cost.forward.at(stage.micro_batch_size), cost.backward.at(stage.micro_batch_size))
        for stage, cost in zip(plan.stages, costs.stages, strict=True)
    ]
    plain = with_seconds(costs, pairs)
    shortest = min(seconds for pair in pairs for seconds in pair)
    factor = min(SHORTEST_ACTION / shortest, LONGEST_STEP / simulate(compile_program(plan), plain).makespan)
    longer = [tuple(max(SHORTEST_ACTION, factor * seconds) for seconds in pair) for pair in pairs]
    return with_seconds(costs, longer)


def with_seconds(costs: StageCosts, pairs: Sequence[tuple[float, ...]]) -> StageCosts:
    stages = tuple(
        replace(cost, forward=Affine(0, forward), backward=Affine(0, backward))
        for cost, (forward, backward) in zip(costs.stages, pairs, strict=True)
    )
    return replace(costs, stages=stages)


class SleepBackwards(torch.autograd.Function):
    """Identity whose backward takes `seconds`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepingStage:
    """Sums its inputs, and sleeps for the given time."""

    uses_random = False
    parts = ()

    def __init__(self, case: Case, index: int) -> None:
        self.index, self.cost = index, case.costs.stages[index]
        self.has_loss = index == case.plan.step_stage
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        time.sleep(self.cost.forward.at(micro_batch.num_samples))
        x = self.weight * sum(values.values())
        y = SleepBackwards.apply(x, self.cost.backward.at(micro_batch.num_samples))
        loss = {LOSS: y.mean()} if self.has_loss else {}
        return {name(self.index, True): y, name(self.index, False): y.detach(), **loss}


class Ones:
    """A data source of ones."""

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        return {name(SOURCE, False): torch.ones(micro_batch.num_samples, WIDTH)}


def name(stage: int, differentiable: bool) -> str:
    return f"stage{stage}" if differentiable else f"stage{stage}.fixed"


def slots(edge: Edge) -> tuple[Slot, ...]:
    differentiable = edge.differentiable and edge.src != SOURCE
    spec = TensorSpec(shape=(Affine(1, 0), Affine(0, WIDTH)), dtype="float32", requires_grad=differentiable)
    return (Slot(name(edge.src, differentiable), spec),)


def measure(rank: int, cases: Sequence[Case], num_steps: int) -> None:
    """All cases on this rank; rank 0 prints a row for each."""
    for case in cases:
        seconds = steps(rank, case, num_steps)
        if rank == 0:
            print(row(case, seconds), flush=True)


def steps(rank: int, case: Case, num_steps: int) -> list[float]:
    """Seconds of each step, from the first start to the last end of all processes, without a first step."""
    plan = case.plan
    executor = Executor(
        compile_program(plan),
        rank,
        stages=[SleepingStage(case, index) for index in range(len(plan.stages))],
        slots=[slots(edge) for edge in plan.edges],
        transport=DistributedTransport(Mesh(plan.num_devices, 1, rank), pairs_of(plan)),
        source=Ones() if rank == 0 else None,
    )
    executor.run()
    seconds = []
    for _ in range(num_steps):
        dist.barrier()
        start = time.monotonic()
        executor.run()
        bounds = torch.tensor([-start, time.monotonic()], dtype=torch.float64)
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        seconds.append(float(bounds.sum()))
    return seconds


HEADER = " | ".join(
    ["| model", "processes", "schedule", "stages, depth", "actions, ms", "simulated, ms"]
    + ["executed: best, ms", "error", "median, ms", "error |"]
)


def row(case: Case, seconds: Sequence[float]) -> str:
    plan = case.plan
    simulated = simulate(compile_program(plan), case.costs).makespan
    actions = [part.fixed * 1e3 for cost in case.costs.stages for part in (cost.forward, cost.backward)]
    figures = " | ".join(
        f"{value * 1e3:.0f} | {value / simulated - 1:+.1%}" for value in (min(seconds), statistics.median(seconds))
    )
    return (
        f"| {case.name} | {plan.num_devices} | {plan.schedule} | {len(plan.stages)}, {plan.depth} "
        f"| {min(actions):.0f} to {max(actions):.0f} | {simulated * 1e3:.0f} | {figures} |"
    )


def cases_for(num_processes: int) -> list[Case]:
    names = [model for model, number in PLACEMENTS if number == num_processes]
    synthetic = [branches(num_processes, schedule) for schedule in ("1f1b", "gpipe")]
    return [*(example(model, num_processes) for model in names), *synthetic]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 8], choices=sorted(BRANCHES))
    parser.add_argument("--steps", type=int, default=5, help="measured steps of every case")
    arguments = parser.parse_args()
    cases = {number: cases_for(number) for number in arguments.processes}
    print(f"{load()}; {arguments.steps} steps of {NUM_MICRO_BATCHES} micro-batches each\n")
    print(HEADER)
    print("|---" * (HEADER.count("|") - 1) + "|", flush=True)
    for number, chosen in cases.items():
        run(number, measure, chosen, arguments.steps)


if __name__ == "__main__":
    main()
