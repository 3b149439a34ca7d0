"""Executed and simulated steps of every schedule, on devices that sleep instead of computing.

    python benchmarks/schedules/emulated.py [--devices 8] [--milliseconds 20]

Four or eight gloo processes run a chain, and a model of two towers that join, with as many stages per device as the
schedule is made for. A forward, the gradients of the inputs and those of the parameters take 40 ms each on every stage.
The stage graph of the towers also runs as a chain of the same stages. The table has best and median of the repetitions;
messages are small. The technique shows costs of order and communication, not of memory bandwidth or cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp.graph import Affine, TensorSpec
from lightning_gpp.plan import STEP, Edge, Figures, Plan, Stage
from lightning_gpp.planning.assignment.estimate import timed
from lightning_gpp.planning.assignment.layout import laid_out
from lightning_gpp.runtime import LOSS, DistributedTransport, Executor, Mesh, MicroBatch, Slot, pairs_of
from lightning_gpp.schedules import Program, compile_program, schedule_names
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.simulation import StageCosts, simulate

sys.path.insert(0, str(Path(__file__).parents[1]))
from processes import load, run  # noqa: E402
from sleeping import WIDTH, Layer  # noqa: E402


class SleepingStage:
    """Sums its inputs, and sleeps."""

    uses_random = False

    def __init__(self, layer: Layer, index: int, plan: Plan) -> None:
        self.layer, self.index, self.last = layer, index, index == plan.step_stage

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return (self.layer,)

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        data = torch.ones(micro_batch.num_samples, WIDTH, requires_grad=True)
        output = self.layer(torch.stack([*values.values()]).sum(0) if values else data)
        return {LOSS: output.square().mean()} if self.last else {f"x{self.index}": output}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    plan: Plan
    costs: StageCosts


def cases(schedule: str, num_devices: int, num_micro_batches: int, seconds: float) -> Iterator[Case]:
    number = method_of(schedule).stages_per_device * num_devices
    half = (number - 2) // 2
    towers = [*((i, i + 1) for i in range(half - 1)), *((i, i + 1) for i in range(half, 2 * half - 1))]
    joined = [*towers, (half - 1, 2 * half), (2 * half - 1, 2 * half), (2 * half, 2 * half + 1)]
    for model, pairs in (("chain", [(i, i + 1) for i in range(number - 1)]), ("towers", joined)):
        plan = plan_of(schedule, num_devices, number, pairs, num_micro_batches, Affine(0, seconds))
        yield case(model, plan)
        if model == "towers":
            yield case("towers as a chain", plan.chained())


def plan_of(
    schedule: str,
    num_devices: int,
    number: int,
    pairs: Sequence[tuple[int, int]],
    num_micro_batches: int,
    seconds: Affine,
) -> Plan:
    method = method_of(schedule)
    figures = Figures(activation_bytes=Affine(0, 1), forward_seconds=seconds)
    stages = tuple(
        Stage(
            name=f"s{index}",
            modules=(f"s{index}", *([STEP] if index == number - 1 else [])),
            devices=(0,),
            micro_batch_size=1,
            figures=figures,
        )
        for index in range(number)
    )
    edges = tuple(Edge(src=src, dst=dst, bytes=Affine(4 * WIDTH)) for src, dst in sorted(pairs))
    plan = Plan(stages=stages, edges=edges, batch_size=num_micro_batches, schedule=schedule)
    plan = laid_out(plan, num_devices, method.layout)
    return both_ways(plan, num_devices) if method.bidirectional else plan


def both_ways(plan: Plan, num_devices: int) -> Plan:
    """A second replica of every stage on the mirrored device."""
    mirrored = [(stage.devices[0], num_devices - 1 - stage.devices[0]) for stage in plan.stages]
    stages = zip(plan.stages, mirrored, strict=True)
    return replace(plan, stages=tuple(replace(stage, devices=pair, round_robin=True) for stage, pair in stages))


def case(model: str, plan: Plan) -> Case:
    """The measurement of a plan. A stage without inputs from others computes all its gradients at once."""
    fed = {edge.dst for edge in plan.edges if not edge.artificial}
    seconds = [stage.figures.forward_seconds for stage in plan.stages]
    stages = tuple(
        Figures(
            forward_seconds=cost,
            input_seconds=cost if index in fed else Affine(0, 2 * cost.fixed),
            weight_seconds=cost if index in fed else Affine(),
            activation_bytes=Affine(0, 1),
            pending_bytes=Affine(0, 1),
        )
        for index, cost in enumerate(seconds)
    )
    costs = StageCosts(stages=stages)
    return Case(model=model, plan=timed(plan, costs), costs=costs)


def measure(rank: int, schedules: Sequence[str], num_micro_batches: int, repetitions: int, seconds: float) -> None:
    num_devices = dist.get_world_size()
    if rank == 0:
        print(f"{num_devices} processes on {load()}, {num_micro_batches} micro-batches\n")
        print("| schedule | model | bubble | in flight | simulated, ms | best, ms | median, ms | best | median |")
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for schedule in schedules:
        for entry in cases(schedule, num_devices, num_micro_batches, seconds):
            row = executed(rank, schedule, entry, repetitions)
            if rank == 0:
                print(row, flush=True)


def executed(rank: int, schedule: str, entry: Case, repetitions: int) -> str:
    program = compile_program(entry.plan)
    executor = executor_of(rank, program)
    times = []
    for _ in range(repetitions + 1):
        dist.barrier()
        start = time.perf_counter()
        executor.run(loss_weight=1 / entry.plan.batch_size)
        dist.barrier()
        times.append(time.perf_counter() - start)
    timeline = simulate(program, entry.costs)
    figures = f"{timeline.bubble_fraction:.1%} | {max(timeline.peak_in_flight.values())}"
    return f"| {schedule} | {entry.model} | {figures} | {compared(timeline.makespan, times[1:])} |"


def executor_of(rank: int, program: Program) -> Executor:
    plan = program.plan
    layers = [Layer(index, stage.figures.forward_seconds.fixed) for index, stage in enumerate(plan.stages)]
    spec = TensorSpec(shape=(Affine(1, 0), Affine(0, WIDTH)), dtype="float32", requires_grad=True)
    return Executor(
        program,
        rank,
        stages={index: SleepingStage(layers[index], index, plan) for index in plan.stages_on(rank)},
        slots=[() if edge.artificial else (Slot(f"x{edge.src}", spec),) for edge in plan.edges],
        transport=DistributedTransport(Mesh(dist.get_world_size(), 1, rank), pairs_of(plan)),
    )


def compared(goal: float, times: Sequence[float]) -> str:
    best, median = min(times), statistics.median(times)
    seconds = " | ".join(f"{1e3 * value:.1f}" for value in (goal, best, median))
    return f"{seconds} | {best / goal - 1:+.1%} | {median / goal - 1:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, help="twice the devices unless given")
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of every action")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--schedules", nargs="*", default=list(schedule_names()))
    arguments = parser.parse_args()
    num_micro_batches = arguments.micro_batches or 2 * arguments.devices
    seconds = arguments.milliseconds / 1000
    run(arguments.devices, measure, arguments.schedules, num_micro_batches, arguments.repetitions, seconds)


if __name__ == "__main__":
    main()
