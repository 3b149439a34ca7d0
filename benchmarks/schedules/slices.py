"""Executed and simulated steps and memory by the number of sequence slices.

    python benchmarks/schedules/slices.py

Four gloo processes train a causal transformer in four stages, micro-batches of one sample. Attention, its cache and all
gradients are real; stages also sleep, 160 ms per micro-batch in the forward and 320 ms in the backward, each slice its
part, so that two cores are enough for four "devices". The memory is the one that autograd keeps on the device that
needs most, simulated from the capture and measured (`saved_bytes`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.graph import Affine
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.planning.assignment.slices import Slicing, sliced
from lightning_gpp.runtime import DistributedTransport, Executor, Mesh, pairs_of
from lightning_gpp.schedules import compile_program
from lightning_gpp.sequence import causal_attention
from lightning_gpp.simulation import StageCost, StageCosts, simulate
from lightning_gpp.stages import build

sys.path.insert(0, str(Path(__file__).parents[1]))
from processes import load, run  # noqa: E402
from saved_bytes import SavedBytes  # noqa: E402
from sleeping import Sleep  # noqa: E402

NUM_DEVICES, TOKENS, WIDTH, HEADS = 4, 256, 64, 4
FORWARD, BACKWARD = 0.16, 0.32


class Block(nn.Module):
    """A transformer block that sleeps for its tokens' part of the seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.awake = True

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        share = 0.0 if self.awake else tokens / TOKENS
        time.sleep(FORWARD * share)
        heads = self.heads(self.norm(x)).view(samples, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(causal_attention(*heads.unbind(0)).transpose(1, 2).reshape(samples, tokens, WIDTH))
        return Sleep.apply(x + self.outer(F.gelu(self.inner(x))), BACKWARD * share)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_DEVICES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


def plan_of(captured: Capture, slices: int, schedule: str) -> Plan:
    """Stage i on device 3 - i, and the step on device 0."""
    drafts = [
        Stage(name=f"s{i}", modules=(f"blocks.{i}",), devices=(NUM_DEVICES - 1 - i,), micro_batch_size=1)
        for i in range(NUM_DEVICES)
    ]
    step = Stage(name="step", modules=(STEP,), devices=(0,), micro_batch_size=1)
    plan = make_plan(captured.graph, [*drafts, step], batch_size=captured.batch_size, schedule=schedule)
    lengths = tuple(TOKENS // slices for _ in range(slices))
    return plan if slices == 1 else sliced(plan, captured.graph, Slicing(slices=lengths))


def costs_of(plan: Plan) -> StageCosts:
    """The seconds that stages sleep."""

    def cost(index: int) -> StageCost:
        stage = plan.stages[index]
        start, stop = stage.tokens or (0, TOKENS)
        share = 0.0 if STEP in stage.modules else (stop - start) / TOKENS
        return StageCost(
            forward=Affine(0, FORWARD * share),
            backward=Affine(0, BACKWARD * share),
            activation_bytes=stage.figures.activation_bytes,
        )

    return StageCosts(stages=tuple(cost(index) for index in range(len(plan.stages))), parameter_copies=0)


def measure(rank: int, counts: Sequence[int], schedules: Sequence[str], micro_batches: int, repetitions: int) -> None:
    torch.manual_seed(0)
    model = Model()
    batch = (torch.randn(micro_batches, TOKENS, WIDTH), torch.randn(micro_batches, TOKENS, WIDTH))
    captured = capture_step(model, batch)
    for block in model.blocks:
        block.awake = False
    if rank == 0:
        print(f"{NUM_DEVICES} processes on {load()}, {micro_batches} micro-batches of {TOKENS} tokens\n")
        titles = (
            "schedule | slices | bubble | simulated, ms | best, ms | median, ms | best | median | kept, KiB | measured"
        )
        print(f"| {titles} |\n|{10 * '---|'}", flush=True)
    for schedule in schedules:
        for slices in counts:
            row = executed(rank, captured, model, batch, plan_of(captured, slices, schedule), repetitions)
            if rank == 0:
                print(f"| {schedule} | {slices} | {row}", flush=True)


def executed(
    rank: int, captured: Capture, model: Model, batch: tuple[Tensor, Tensor], plan: Plan, repetitions: int
) -> str:
    program, pipeline = compile_program(plan), build(captured, plan, model)
    executor = Executor(
        program,
        rank,
        stages=pipeline.stages,
        slots=pipeline.slots,
        transport=DistributedTransport(Mesh(NUM_DEVICES, 1, rank), pairs_of(plan)),
        source=pipeline.source if rank == 0 else None,
    )
    saved, times = SavedBytes(model), []
    for _ in range(repetitions + 1):
        pipeline.step.begin(batch, lambda samples: model.training_step(samples, 0), seed=0)
        dist.barrier()
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
            executor.run(loss_weight=1 / plan.batch_size)
        dist.barrier()
        times.append(time.perf_counter() - start)
        pipeline.step.end()
    most = torch.tensor([float(saved.peak)])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    timeline = simulate(program, costs_of(plan))
    goal, best, median = timeline.makespan, min(times[1:]), statistics.median(times[1:])
    seconds = " | ".join(f"{1e3 * value:.0f}" for value in (goal, best, median))
    kept = f"{max(timeline.peak_bytes) / 1024:.0f} | {most.item() / 1024:.0f}"
    return f"{timeline.bubble_fraction:.1%} | {seconds} | {best / goal - 1:+.1%} | {median / goal - 1:+.1%} | {kept} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--schedules", nargs="*", default=["1f1b", "gpipe"])
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    run(NUM_DEVICES, measure, arguments.slices, arguments.schedules, arguments.micro_batches, arguments.repetitions)


if __name__ == "__main__":
    main()
