"""The model of the report: two towers that do not need each other, and a head; and loops that train it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp import Engine, Options, initialize

Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of model and mini-batch. `tokens`: those of a sample, if layers are transformers'; 0: they are linear."""

    width: int
    layers: int
    samples: int
    micro_batches: int = 4
    tokens: int = 0


TINY = Shape(width=8, layers=2, samples=8, micro_batches=8)
"""Nearly all time is overhead."""


def ordinary(device: torch.device) -> Shape:
    """Nearly all time is computation."""
    if device.type == "cuda":
        return Shape(width=2048, layers=8, samples=4096)
    return Shape(width=512, layers=4, samples=256)


def transformers(device: torch.device) -> Shape:
    """Layers of the kind that most memory is used for."""
    if device.type == "cuda":
        return Shape(width=1024, layers=12, samples=64, tokens=512)
    return Shape(width=256, layers=6, samples=16, tokens=64)


class Towers(nn.Module):
    """Logits of two inputs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*(part for _ in range(shape.layers) for part in _layer(shape))) for _ in range(2)
        )
        self.head = nn.Linear(2 * shape.width, 16)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        found = self.head(torch.cat([self.left(a), self.right(b)], dim=-1))
        return found.mean(1) if found.dim() == 3 else found

    def training_step(self, batch: Batch) -> Tensor:
        a, b, labels = batch
        return nn.functional.cross_entropy(self(a, b), labels)


def _layer(shape: Shape) -> tuple[nn.Module, ...]:
    width = shape.width
    if not shape.tokens:
        return nn.Linear(width, width), nn.GELU()
    return (nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True),)


def layout(world_size: int) -> list[dict[str, Any]]:
    """Three stages on the devices of a pipeline; the head on the first one."""
    places = {"left": world_size - 1, "right": (world_size - 1) // 2, "head": 0}
    return [
        {"modules": [name, *(["@step"] if name == "head" else [])], "devices": [place]}
        for name, place in places.items()
    ]


def model_of(shape: Shape, device: torch.device, dtype: torch.dtype) -> Towers:
    torch.manual_seed(0)
    return Towers(shape).to(device, dtype)


def batch_of(shape: Shape, device: torch.device, dtype: torch.dtype) -> Batch:
    generator = torch.Generator().manual_seed(1)
    sizes = (shape.samples, *filter(None, [shape.tokens]), shape.width)
    a, b = (torch.randn(*sizes, generator=generator).to(device, dtype) for _ in range(2))
    return a, b, torch.randint(0, 16, (shape.samples,), generator=generator).to(device)


@dataclass(slots=True)
class Job:
    """A pipeline that trains."""

    engine: Engine
    model: Towers
    optimizer: torch.optim.Optimizer
    batch: Batch

    def step(self) -> Tensor:
        """A complete step; returns the loss."""
        loss = self.engine.train_step(self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


@contextmanager
def pipeline(
    device: torch.device,
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    precision: torch.dtype | None = None,
    rate: float = 1e-4,
    frozen: Sequence[str] = (),
    **options: Any,
) -> Iterator[Job]:
    """The towers as a pipeline of all processes."""
    model, batch = model_of(shape, device, dtype), batch_of(shape, device, dtype)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    given = {"stages": layout(dist.get_world_size()), "num_micro_batches": shape.micro_batches, **options}
    started = initialize(
        *(model, optimizer, batch),
        options=Options(**given),
        device=device,
        context=context,
        precision=precision,
    )
    with started as engine:
        yield Job(engine, model, optimizer, batch)


def gradients_of(
    model: Towers,
    batch: Batch,
    micro_batches: int,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Add the gradients of a mini-batch in micro-batches; returns its loss."""
    total = torch.zeros((), device=batch[0].device, dtype=torch.float64)
    for part in zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True):
        with context():
            loss = model.training_step(part) / micro_batches
        loss.backward()
        total += loss.detach()
    return total


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(step: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a step, from a barrier until the device has done it."""
    dist.barrier()
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - start


def medians(device: torch.device, repetitions: int, *steps: Callable[[], Any]) -> list[float]:
    """Median seconds of steps that take turns."""
    for step in steps:
        step()
    taken = [[seconds_of(step, device) for step in steps] for _ in range(repetitions)]
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def autocast(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    return partial(torch.autocast, device.type, torch.bfloat16)
