"""A model with two branches, split into four stages, by torch.distributed.pipelining and by this library.

    python benchmarks/branches.py

    trunk -> a -> head        torch finds the modules of a stage by name, and its edges by its place in the graph. With
      `----> b ----^          branches the two orders differ: towers run on each other's inputs, without an error.

It prints the relative errors of output and gradients compared with the undivided model, in float64, and for torch's
output also compared with the model with swapped towers.
"""

from __future__ import annotations

from collections.abc import Mapping

import lightning as L
import torch
import torch.distributed as dist
from processes import run
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

from lightning_gpp.capture import capture_step
from lightning_gpp.plan import STEP, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.runtime import DistributedTransport, Executor, Mesh, pairs_of
from lightning_gpp.schedules import compile_program
from lightning_gpp.stages import build

WIDTH = 8
NUM_SAMPLES = 8
MICRO_BATCH = 2
NUM_MICRO_BATCHES = NUM_SAMPLES // MICRO_BATCH
PARTS = ("trunk", "a", "b", "head")
Batch = tuple[Tensor, Tensor]
Result = tuple[Tensor, dict[str, Tensor]]
"""Output of the model for the whole mini-batch, and gradients by parameter name."""


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x).tanh(), self.right(x).tanh()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.mix(a, b)


class Branches(L.LightningModule):
    """An ordinary LightningModule, written without stages in mind."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.trunk(x)
        return self.head(self.a(left), self.b(right))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        output = self(x)
        return {"loss": nn.functional.mse_loss(output, y), "output": output.detach()}


def model_and_batch() -> tuple[Branches, Batch]:
    torch.manual_seed(0)
    model = Branches().double()
    x, y = torch.randn(2, NUM_SAMPLES, WIDTH, dtype=torch.float64)
    return model, (x, y)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def eager() -> Result:
    model, batch = model_and_batch()
    result = model.training_step(batch, 0)
    result["loss"].backward()
    return result["output"], gradients(model)


def swapped() -> Tensor:
    """The output of the model with the towers on each other's inputs."""
    model, (x, _) = model_and_batch()
    left, right = model.trunk(x)
    output: Tensor = model.head(model.b(left), model.a(right))
    return output.detach()


def with_torch(rank: int) -> Result | None:
    model, (x, y) = model_and_batch()
    cuts = dict.fromkeys(PARTS[1:], SplitPoint.BEGINNING)
    pipe = pipeline(model, mb_args=(x[:MICRO_BATCH],), split_spec=cuts)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, NUM_MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    output = schedule.step(x) if rank == 0 else schedule.step(target=y) if rank == len(PARTS) - 1 else schedule.step()
    return collect(rank, output, gradients(stage.submod))


def with_ours(rank: int) -> Result | None:
    model, batch = model_and_batch()
    captured = capture_step(model, batch)
    drafts = [
        Stage(name=part, modules=(part,) if part != "head" else ("head", STEP), devices=(3 - i,), micro_batch_size=2)
        for i, part in enumerate(PARTS)
    ]
    plan = make_plan(captured.graph, drafts, batch_size=NUM_SAMPLES, schedule="gpipe")
    pipeline = build(captured, plan, model)
    executor = Executor(
        compile_program(plan),
        rank,
        stages=pipeline.stages,
        slots=pipeline.slots,
        transport=DistributedTransport(Mesh(len(PARTS), 1, rank), pairs_of(plan)),
        source=pipeline.source,
    )
    pipeline.step.begin(batch, lambda samples: model.training_step(samples, 0), seed=0)
    executor.run(loss_weight=1 / NUM_SAMPLES)
    outputs = [returned["output"] for _, returned in pipeline.step.outputs]
    return collect(rank, torch.cat(outputs) if outputs else None, gradients(model))


def collect(rank: int, output: Tensor | None, grads: Mapping[str, Tensor]) -> Result | None:
    """Collect the only output and all gradients on rank 0."""
    found: list[tuple[Tensor | None, dict[str, Tensor]] | None] = [None] * dist.get_world_size()
    dist.gather_object((output, dict(grads)), found if rank == 0 else None)
    outputs = [entry[0] for entry in found if entry is not None and entry[0] is not None]
    merged = {name: grad for entry in found if entry is not None for name, grad in entry[1].items()}
    return (outputs[-1], merged) if rank == 0 else None


def error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], part: str) -> float:
    """Relative error of the gradients of one part, as one vector."""
    names = [name for name in expected if name.startswith(f"{part}.")]
    difference = torch.cat([(actual[name] - expected[name]).flatten() for name in names])
    return float(difference.norm() / torch.cat([expected[name].flatten() for name in names]).norm())


def row(library: str, result: Result, expected: Result) -> str:
    output = float((result[0] - expected[0]).norm() / expected[0].norm())
    cells = [output, *(error(result[1], expected[1], part) for part in PARTS)]
    return f"| {library} | " + " | ".join(f"{cell:.1e}" for cell in cells) + " |"


def report_swapped(result: Result | None) -> None:
    if result is not None:
        distance = float((result[0] - swapped()).norm() / swapped().norm())
        print(f"\ntorch.distributed.pipelining against the model with swapped towers: {distance:.1e}")


def compare(rank: int) -> None:
    results = {"torch.distributed.pipelining": with_torch(rank), "lightning_gpp": with_ours(rank)}
    if rank == 0:
        print("| relative error of | output |" + "".join(f" gradients of {part} |" for part in PARTS))
        print("|---" * (len(PARTS) + 2) + "|")
        for library, result in results.items():
            if result is not None:
                print(row(library, result, eager()))
        report_swapped(results["torch.distributed.pipelining"])


if __name__ == "__main__":
    run(len(PARTS), compare)
