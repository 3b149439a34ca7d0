"""Schedules of this library and of torch.distributed.pipelining: same stages, micro-batches and processes.

    python benchmarks/schedules/torch_pipelining.py

Four gloo processes are four devices whose stages sleep instead of computing: a forward, the gradients of the inputs and
those of the parameters take 20 ms each on every device, divided by its stages. All variants run in turn in the same
processes; medians over the repetitions. Gradients of both libraries are compared. For the memory, fresh processes run
one step without sleeping, on tensors of 16 MiB: the peak of the resident memory above that before the step, on the
device that needs most.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn

from lightning_gpp.graph import Affine, TensorSpec
from lightning_gpp.plan import STEP, Edge, Figures, Plan, Stage
from lightning_gpp.runtime import LOSS, DistributedTransport, Executor, Mesh, MicroBatch, Slot, pairs_of
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, simulate

sys.path.insert(0, str(Path(__file__).parents[1]))
from processes import load, run  # noqa: E402
from sleeping import WIDTH, Layer  # noqa: E402

NUM_DEVICES = 4
SECONDS = 0.02
SMALL, LARGE = 1, 2**18
"""Rows of `WIDTH` float32 per sample."""

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Pair:
    """A schedule in both libraries; `zigzag` and `num_chunks` determine the stages of a device."""

    ours: str
    torch: str
    num_chunks: int = 1
    zigzag: bool = False

    def device(self, stage: int) -> int:
        lap, place = divmod(stage, NUM_DEVICES)
        return NUM_DEVICES - 1 - place if self.zigzag and lap % 2 else place

    @property
    def num_stages(self) -> int:
        return self.num_chunks * NUM_DEVICES


PAIRS = (
    Pair("gpipe", "ScheduleGPipe"),
    Pair("1f1b", "Schedule1F1B"),
    Pair("interleaved", "ScheduleInterleaved1F1B", 2),
    Pair("breadth_first", "ScheduleLoopedBFS", 2),
    Pair("adaptive", "ScheduleInterleavedZeroBubble", 2),
    Pair("zbv", "ScheduleZBVZeroBubble", 2, zigzag=True),
    Pair("dualpipe_v", "ScheduleDualPipeV", 2, zigzag=True),
)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class OurStage:
    uses_random = False

    def __init__(self, layer: Layer, index: int, num_stages: int, data: tuple[Tensor, Tensor]) -> None:
        self.layer, self.index, self.last, self.data = layer, index, index == num_stages - 1, data

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return (self.layer,)

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        x, target = (tensor[micro_batch.start : micro_batch.stop] for tensor in self.data)
        output = self.layer(values[f"x{self.index}"] if self.index else x)
        if self.last:
            return {LOSS: loss_of(output, target)}
        return {f"x{self.index + 1}": output}


def data_of(num_micro_batches: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if rows == LARGE:  # one sample that all micro-batches share, because data are not measured
        return torch.ones(1, rows, WIDTH).expand(num_micro_batches, -1, -1), torch.zeros(num_micro_batches, 1, 1)
    x, target = torch.randn(2, num_micro_batches, rows, WIDTH, generator=generator)
    return x, target


def plan_of(pair: Pair, num_micro_batches: int, seconds: float) -> Plan:
    cost = Affine(0, seconds)
    figures = Figures(activation_bytes=Affine(0, 1), forward_seconds=cost, input_seconds=cost, weight_seconds=cost)
    stages = tuple(
        Stage(
            name=f"s{index}",
            modules=(f"s{index}", *([STEP] if index == pair.num_stages - 1 else [])),
            devices=(pair.device(index),),
            micro_batch_size=1,
            figures=figures,
        )
        for index in range(pair.num_stages)
    )
    edges = tuple(Edge(src=i, dst=i + 1) for i in range(pair.num_stages - 1))
    return Plan(stages=stages, edges=edges, batch_size=num_micro_batches, schedule=pair.ours)


def our_step(rank: int, pair: Pair, num: int, rows: int, seconds: float) -> tuple[Step, list[Layer]]:
    plan = plan_of(pair, num, seconds)
    layers = [Layer(index, seconds) for index in plan.stages_on(rank)]
    mine = dict(zip(plan.stages_on(rank), layers, strict=True))
    spec = TensorSpec(shape=(Affine(1, 0), Affine(0, rows), Affine(0, WIDTH)), dtype="float32", requires_grad=True)
    executor = Executor(
        compile_program(plan),
        rank,
        stages={i: OurStage(layer, i, pair.num_stages, data_of(num, rows)) for i, layer in mine.items()},
        slots=[(Slot(f"x{edge.dst}", spec),) for edge in plan.edges],
        transport=DistributedTransport(Mesh(NUM_DEVICES, 1, rank), pairs_of(plan)),
    )
    return lambda: executor.run(loss_weight=1 / num), layers


def torch_step(rank: int, pair: Pair, num: int, rows: int, seconds: float) -> tuple[Step, list[Layer]]:
    indices = [index for index in range(pair.num_stages) if pair.device(index) == rank]
    layers = [Layer(index, seconds) for index in indices]
    stages = [
        pipelining.PipelineStage(layer, index, pair.num_stages, torch.device("cpu"))
        for index, layer in zip(indices, layers, strict=True)
    ]
    x, target = data_of(num, rows)
    schedule = getattr(pipelining, pair.torch, None) or getattr(pipelining.schedules, pair.torch)
    runner = schedule(stages[0] if pair.num_chunks == 1 else stages, num, loss_fn=loss_of)
    arguments = (x,) if 0 in indices else ()
    keywords = {"target": target, "losses": []} if pair.num_stages - 1 in indices else {}
    return lambda: runner.step(*arguments, **keywords), layers


MAKERS = {"torch": torch_step, "ours": our_step}


def measure(rank: int, numbers: list[int], repetitions: int, pairs: list[Pair]) -> None:
    if rank == 0:
        print(f"{NUM_DEVICES} processes on {load()}\n")
        print("| ours | torch | micro-batches | simulated | ours, ms | torch, ms | throughput, ours / torch |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for num in numbers:
        for pair in pairs:
            row = compared(rank, pair, num, repetitions)
            if rank == 0:
                print(row, flush=True)


def compared(rank: int, pair: Pair, num: int, repetitions: int) -> str:
    seconds = SECONDS / pair.num_chunks
    made = {name: make(rank, pair, num, SMALL, seconds) for name, make in MAKERS.items()}
    check(made)
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repetitions):
        for name, (step, _) in made.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(1e3 * (time.perf_counter() - start))
    ours, theirs = (statistics.median(times[name]) for name in ("ours", "torch"))
    cost = Figures(
        forward_seconds=Affine(0, seconds), input_seconds=Affine(0, seconds), weight_seconds=Affine(0, seconds)
    )
    plan = plan_of(pair, num, seconds)
    expected = 1e3 * simulate(compile_program(plan), StageCosts(stages=(cost,) * pair.num_stages)).makespan
    name = re.sub("^Schedule", "", pair.torch)
    return f"| {pair.ours} | {name} | {num} | {expected:.0f} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.3f} |"


def check(made: Mapping[str, tuple[Step, list[Layer]]]) -> None:
    """Warm up, and compare the gradients."""
    for step, layers in made.values():
        step()
        for layer in layers:
            layer.zero_grad()
    for step, _ in made.values():
        step()
    for ours, theirs in zip(made["ours"][1], made["torch"][1], strict=True):
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def peaks(rank: int, pair: Pair, library: str, num: int, path: str) -> None:
    step, _ = MAKERS[library](rank, pair, num, LARGE, 0.0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmHWM")
    step()
    most = torch.tensor([resident("VmHWM") - before])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        Path(path).write_text(str(most.item()))


def resident(key: str) -> float:
    """Peak resident memory of this process since the last reset, in MiB, from the kernel."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def memory(num: int, pairs: list[Pair]) -> None:
    print(f"\nPeak of one step with {num} micro-batches, MiB on the device that needs most:\n")
    print("| ours | torch | ours, MiB | torch, MiB | ours / torch |\n|---|---|---|---|---|")
    for pair in pairs:
        found = {}
        for library in MAKERS:
            path = Path("/tmp") / f"peak_{library}.txt"
            run(NUM_DEVICES, peaks, pair, library, num, str(path))
            found[library] = float(path.read_text())
            path.unlink()
        ratio = found["ours"] / found["torch"]
        name = re.sub("^Schedule", "", pair.torch)
        print(f"| {pair.ours} | {name} | {found['ours']:.0f} | {found['torch']:.0f} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--repetitions", type=int, default=7, help="of every variant, interleaved")
    parser.add_argument("--schedules", nargs="*", default=[], help="names of ours; all by default")
    arguments = parser.parse_args()
    pairs = [pair for pair in PAIRS if not arguments.schedules or pair.ours in arguments.schedules]
    run(NUM_DEVICES, measure, arguments.micro_batches, arguments.repetitions, pairs)
    memory(8, pairs)


if __name__ == "__main__":
    main()
