"""This library beside torch.distributed.pipelining: the same two stages, 1F1B, in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.gpu.towers import TINY, Shape, medians, ordinary, wait
from lightning_gpp import Options, initialize

REPETITIONS = 15


def halves(shape: Shape, device: torch.device) -> nn.Sequential:
    """Two stages of a chain."""
    torch.manual_seed(0)
    width = shape.width
    layers = [nn.Sequential(*(nn.Linear(width, width) for _ in range(shape.layers))) for _ in range(2)]
    return nn.Sequential(*layers).to(device)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def step_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(model(batch[0]), batch[1])


def beside(device: torch.device, tiny: bool) -> dict[str, float]:
    """Median seconds of a step of both libraries, and of a forward and a backward of one stage alone.

    torch's takes no CUDA tensors over gloo; then its figure is missing.
    """
    shape = TINY if tiny else ordinary(device)
    generator = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(shape.samples, shape.width, generator=generator).to(device) for _ in range(2))
    model, rank = halves(shape, device), dist.get_rank()
    steps: dict[str, Callable[[], Any]] = {}
    if device.type == "cpu" or dist.get_backend() == "nccl":
        steps["torch"] = torchs_step(halves(shape, device)[rank], rank, shape, batch, device)
    options = Options(stages={"0": 0, "1": 1}, num_micro_batches=shape.micro_batches, schedule="1f1b")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with initialize(model, optimizer, batch, step=step_of, options=options, device=device) as engine:
        steps["ours"] = lambda: engine.train_step(batch)
        found = dict(zip(steps, medians(device, REPETITIONS, *steps.values()), strict=True))
    alone = halves(shape, device)[0]
    part = torch.randn(shape.samples // shape.micro_batches, shape.width, device=device, requires_grad=True)
    found["alone"] = medians(device, REPETITIONS, lambda: alone(part).sum().backward())[0]
    return found


def torchs_step(
    module: nn.Module, rank: int, shape: Shape, batch: tuple[Tensor, Tensor], device: torch.device
) -> Callable[[], Any]:
    stage = PipelineStage(module, rank, 2, device)
    schedule = Schedule1F1B(stage, shape.micro_batches, loss_fn=loss_of)

    def step() -> None:
        if rank == 0:
            schedule.step(batch[0])
        else:
            losses: list[Tensor] = []
            schedule.step(target=batch[1], losses=losses)
            float(torch.stack(losses).mean())  # ours returns the loss, too
        wait(device)

    return step


def overhead(found: dict[str, float], library: str) -> float:
    """Seconds per action beyond a schedule with free communication."""
    count = TINY.micro_batches
    return (found[library] - (count + 1) * found["alone"]) / (2 * count)
