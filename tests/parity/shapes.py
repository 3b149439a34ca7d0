"""Shapes of models, each in eight blocks: chain, two towers, skip connections, encoder and decoder; and sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity import sequences
from tests.parity.sequences import OTHER_TOKENS, TOKENS, Decoder, Translator

WIDTH = 6

Batch = tuple[Tensor, Tensor, Tensor]
"""Two inputs and a target, (samples, WIDTH) each."""


class Block(nn.Module):
    """A residual block; of several inputs it takes the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            x = x + torch.tanh(other)
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Shape(nn.Module):
    """The step that all shapes share; their forwards take both tensors of the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        first, second, target = batch
        return F.mse_loss(self(first, second), target)


class Chain(Shape):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        x = first + second
        for block in self.blocks:
            x = block(x)
        return x


class Towers(Shape):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
        self.trunk = nn.ModuleList(Block() for _ in range(2))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        for left, right in zip(self.left, self.right, strict=True):
            first, second = left(first), right(second)
        return self.trunk[1](self.trunk[0](first, second))


class Skips(Shape):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(Block() for _ in range(4)) for _ in range(2))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        x, kept = first + second, []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for block in self.up:
            x = block(x, kept.pop())
        return x


class EncoderDecoder(Shape):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.ModuleList(Block() for _ in range(4)) for _ in range(2))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        for block in self.encoder:
            first = block(first)
        for block in self.decoder:
            second = block(second, first)
        return second


@dataclass(frozen=True, kw_only=True)
class Model:
    """How to make it, its blocks in four stages, and the sizes of a sample of both inputs and the target.

    A block is a stage where there are to be eight."""

    make: Callable[[], nn.Module]
    stages: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[int, ...], ...] = ((WIDTH,),) * 3

    @property
    def is_sequence(self) -> bool:
        return len(self.sizes[0]) > 1

    def in_stages(self, number: int) -> list[tuple[str, ...]]:
        return list(self.stages) if number <= 4 else [(block,) for stage in self.stages for block in stage]


def _of(name: str, start: int, stop: int) -> tuple[str, ...]:
    return tuple(f"{name}.{i}" for i in range(start, stop))


def _halves(*names: str) -> tuple[tuple[str, ...], ...]:
    return tuple(_of(name, start, start + 2) for name in names for start in (0, 2))


SEQUENCES = tuple((tokens, sequences.WIDTH) for tokens in (TOKENS, OTHER_TOKENS, TOKENS))

MODELS = {
    "chain": Model(make=Chain, stages=tuple(_of("blocks", i, i + 2) for i in range(0, 8, 2))),
    "two towers": Model(
        make=Towers, stages=(_of("left", 0, 3), _of("right", 0, 3), _of("trunk", 0, 1), _of("trunk", 1, 2))
    ),
    "skip connections": Model(make=Skips, stages=_halves("down", "up")),
    "encoder and decoder": Model(make=EncoderDecoder, stages=_halves("encoder", "decoder")),
    "decoder": Model(make=Decoder, stages=tuple(_of("blocks", i, i + 2) for i in range(0, 8, 2)), sizes=SEQUENCES),
    "translator": Model(make=Translator, stages=_halves("encoder", "decoder"), sizes=SEQUENCES),
}


def made(name: str, dtype: torch.dtype) -> nn.Module:
    """The model with the same weights in every process."""
    torch.manual_seed(7)
    return MODELS[name].make().to(dtype)


def data(name: str, num_samples: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(11)
    sizes = MODELS[name].sizes
    return tuple(torch.randn(num_samples, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
