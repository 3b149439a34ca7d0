"""Layers that sleep for as long as they would compute: the forward, and the two kinds of gradients apart."""

from __future__ import annotations

import time
from typing import Final

import torch
from torch import Tensor, nn

WIDTH: Final = 16


class Sleep(torch.autograd.Function):
    """The identity, whose backward takes time."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return gradients[0], None


class Layer(nn.Module):
    """A product with its parameter; forward, gradients of the input and of the parameter each sleep so long."""

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter((1 + 0.01 * number) * torch.eye(WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return nn.functional.linear(Sleep.apply(x, self.seconds), Sleep.apply(self.weight, self.seconds))
