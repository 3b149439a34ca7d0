"""Layers that sleep instead of computing, separately for the forward and for both kinds of gradients."""

from __future__ import annotations

import time
from typing import Final

import torch
from torch import Tensor, nn

WIDTH: Final = 16


class Sleep(torch.autograd.Function):
    """The identity, with a backward that sleeps."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return gradients[0], None


class Layer(nn.Module):
    """A product with a parameter; the forward, the input gradient and the weight gradient each sleep."""

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter((1 + 0.01 * number) * torch.eye(WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return nn.functional.linear(Sleep.apply(x, self.seconds), Sleep.apply(self.weight, self.seconds))
