"""Overhead per compute action of this library's executor and of torch.distributed.pipelining, in the same run.

    python benchmarks/overhead.py

Two gloo processes with one thread each run the same two stages of tiny layers (width 8, one sample per micro-batch), so
that nearly all of the time is overhead. Repetitions of all variants are interleaved. An action's overhead is the step
time minus that of its schedule with free communication, divided by the compute actions of a rank (forwards and
backwards). In "ours" the first rank has the input already, as in torch, so that the same tensors travel. In "ours, data
sent" it gets the input from the rank that loads the data, as in training, which is a third message. "No flush" is 1F1B
as a continuous program, from an empty pipeline to an empty one in every repetition, without and with a weight policy;
there are no optimizer steps.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lightning_gpp.graph import Affine, TensorSpec
from lightning_gpp.plan import SOURCE, STEP, Edge, Plan, Stage
from lightning_gpp.runtime import LOSS, DistributedTransport, Executor, Mesh, MicroBatch, Slot, pairs_of
from lightning_gpp.runtime.weights import Counting, make_policy
from lightning_gpp.runtime.weights.context import weights_of
from lightning_gpp.schedules import Program, compile_program
from lightning_gpp.schedules.continuous import continuous_program

WIDTH = 8
NUM_LAYERS = 4
MICRO_BATCHES = (8, 32)
TORCH_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
Step = Callable[[int, int], object]
"""Trains mini-batch i of n."""


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def inputs(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, num_samples, WIDTH, generator=generator)
    return x, target


class FirstStage:
    uses_random = False

    def __init__(self, module: nn.Module, x: Tensor | None) -> None:
        self.module, self.x = module, x

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        x = values["x"] if self.x is None else self.x[micro_batch.start : micro_batch.stop]
        return {"hidden": self.module(x)}


class LastStage:
    uses_random = False

    def __init__(self, module: nn.Module, target: Tensor) -> None:
        self.module, self.target = module, target

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        output = self.module(values["hidden"])
        return {LOSS: nn.functional.mse_loss(output, self.target[micro_batch.start : micro_batch.stop])}


class Input:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        return {"x": self.x[micro_batch.start : micro_batch.stop]}


def plan_of(schedule: str, num_samples: int, send_data: bool) -> Plan:
    """Stage 0 on device 1, stage 1 with the step on device 0."""
    names = (("first", 1, "first"), ("last", 0, STEP))
    stages = tuple(Stage(name=n, modules=(m,), devices=(d,), micro_batch_size=1) for n, d, m in names)
    data = (Edge(src=SOURCE, dst=0, differentiable=False),) if send_data else ()
    return Plan(stages=stages, edges=(*data, Edge(src=0, dst=1)), batch_size=num_samples, schedule=schedule)


def slots_of(requires_grad: bool, name: str) -> tuple[Slot, ...]:
    shape = (Affine(1, 0), Affine(0, WIDTH))
    return (Slot(name, TensorSpec(shape=shape, dtype="float32", requires_grad=requires_grad)),)


def our_step(rank: int, schedule: str, num_samples: int, send_data: bool = False) -> tuple[Step, nn.Module]:
    plan = plan_of(schedule, num_samples, send_data)
    modules = layers(0), layers(1)
    executor = executor_of(rank, compile_program(plan), modules)
    return lambda number, steps: executor.run(loss_weight=1 / num_samples), modules[1 - rank]


def step_without_flush(rank: int, schedule: str, num_samples: int, policy: str = "") -> tuple[Step, nn.Module]:
    program = continuous_program(plan_of(schedule, num_samples, send_data=False))
    modules = layers(0), layers(1)
    parameters = {1 - rank: list(modules[1 - rank].parameters())}
    weights = make_policy(policy, weights_of(program, rank, parameters, lambda: [])) if policy else None
    executor = executor_of(rank, program, modules, weights)

    def step(number: int, steps: int) -> None:
        if weights is not None and number == 0:
            weights.begin(lambda batch: 0, 0)
        executor.run(loss_weight=1 / num_samples, step=number, first=0, last=steps)

    return step, modules[1 - rank]


def executor_of(
    rank: int, program: Program, modules: tuple[nn.Module, nn.Module], weights: Counting | None = None
) -> Executor:
    plan = program.plan
    send_data = any(edge.src == SOURCE for edge in plan.edges)
    x, target = inputs(plan.batch_size)
    return Executor(
        program,
        rank,
        stages=[FirstStage(modules[0], None if send_data else x), LastStage(modules[1], target)],
        slots=[slots_of(edge.differentiable, "hidden" if edge.differentiable else "x") for edge in plan.edges],
        transport=DistributedTransport(Mesh(2, 1, rank), pairs_of(plan)),
        source=Input(x),
        weights=weights,
    )


def torch_step(rank: int, schedule: str, num_samples: int) -> tuple[Step, nn.Module]:
    x, target = inputs(num_samples)
    module = layers(rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    runner = TORCH_SCHEDULES[schedule](stage, num_samples, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        return lambda number, steps: runner.step(x), module
    return lambda number, steps: runner.step(target=target), module


def alone(num_samples: int) -> float:
    """Seconds of a forward and a backward of one stage, without a pipeline: the compute inside an action pair."""
    module = layers(0)
    x = torch.randn(1, WIDTH)
    seed = torch.ones(1, WIDTH)
    start = time.perf_counter()
    for _ in range(num_samples):
        torch.autograd.backward([module(x.requires_grad_())], [seed])
    return (time.perf_counter() - start) / num_samples


MAKERS = {
    "torch": torch_step,
    "ours": our_step,
    "ours, data sent": partial(our_step, send_data=True),
    "ours, no flush": step_without_flush,
    "ours, no flush, stash": partial(step_without_flush, policy="stash"),
}


@dataclass(frozen=True)
class Variant:
    runner: str
    schedule: str
    num_micro_batches: int

    @property
    def flushes(self) -> bool:
        return "no flush" not in self.runner


VARIANTS = [
    variant
    for variant in (Variant(lib, name, m) for m in MICRO_BATCHES for name in TORCH_SCHEDULES for lib in MAKERS)
    if variant.flushes or variant.schedule == "1f1b"
]


def measure(rank: int, port: int, repetitions: int, steps: int, best: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    made = {v: MAKERS[v.runner](rank, v.schedule, v.num_micro_batches) for v in VARIANTS}
    run_all_once(made)
    wall: dict[Variant, list[float]] = {variant: [] for variant in VARIANTS}
    cpu: dict[Variant, list[float]] = {variant: [] for variant in VARIANTS}
    compute: list[float] = []
    for _ in range(repetitions):
        for variant, (step, _) in made.items():
            seconds, busy = timed(step, steps)
            wall[variant].append(seconds)
            cpu[variant].append(busy)
        dist.barrier()
        compute.append(alone(32))
    if rank == 0:
        chosen = min if best else statistics.median
        summary = [{variant: chosen(listed) for variant, listed in of.items()} for of in (wall, cpu)]
        print(table(summary[0], summary[1], chosen(compute), steps))
    dist.destroy_process_group()


def run_all_once(made: Mapping[Variant, tuple[Step, nn.Module]]) -> None:
    """Warm everything up, and check that both libraries compute the same gradients."""
    for step, module in made.values():
        step(0, 1)
        module.zero_grad()
    for variant, (step, module) in made.items():
        step(0, 1)
        norm = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()
        norms = [torch.zeros(()) for _ in range(2)]
        dist.all_gather(norms, norm)
        total = torch.stack(norms).norm()
        expected = expected_norm(variant.num_micro_batches)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=0, msg=f"{variant} computes other gradients")


def expected_norm(num_samples: int) -> Tensor:
    x, target = inputs(num_samples)
    model = nn.Sequential(layers(0), layers(1))
    nn.functional.mse_loss(model(x), target).backward()
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


def timed(step: Step, steps: int) -> tuple[float, float]:
    """Wall seconds and CPU seconds of one step, the mean of `steps`."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    for number in range(steps):
        step(number, steps)
    return (time.perf_counter() - start) / steps, (time.process_time() - busy) / steps


def table(wall: Mapping[Variant, float], cpu: Mapping[Variant, float], compute: float, steps: int) -> str:
    rows = [
        "| schedule | micro-batches | | step, ms | overhead per action, us | ratio to torch | CPU per action, us |",
        "|---|---|---|---|---|---|---|",
    ]
    figures = {}
    for variant in VARIANTS:
        actions = 2 * variant.num_micro_batches
        step = wall[variant]
        bubble = 1 if variant.flushes else 1 / steps
        overhead = (step - (variant.num_micro_batches + bubble) * compute) / actions
        figures[variant] = overhead
        busy = cpu[variant] / actions
        ratio = overhead / figures[Variant("torch", variant.schedule, variant.num_micro_batches)]
        name = f"| {variant.schedule} | {variant.num_micro_batches} | {variant.runner} "
        rows.append(f"{name}| {step * 1e3:.2f} | {overhead * 1e6:.0f} | {ratio:.2f} | {busy * 1e6:.0f} |")
    return "\n".join([f"A forward and a backward of one stage alone: {compute * 1e6:.0f} us.\n", *rows])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15, help="of every variant, interleaved")
    parser.add_argument("--steps", type=int, default=20, help="in each repetition")
    parser.add_argument("--best", action="store_true", help="shortest repetitions, for busy machines, not medians")
    arguments = parser.parse_args()
    multiprocessing.spawn(measure, (free_port(), arguments.repetitions, arguments.steps, arguments.best), nprocs=2)


if __name__ == "__main__":
    main()
