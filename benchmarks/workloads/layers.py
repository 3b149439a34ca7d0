"""Layers that several workloads share: attention on scaled dot products, pre-norm blocks, stacks of linear layers."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Trained(L.LightningModule):
    """A LightningModule trained by AdamW."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Attention(nn.Module):
    """Multi-head attention of `[batch, length, width]` on itself, without biases."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.value, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            part(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Up, GELU, down, without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm Transformer layer."""

    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention, self.feed_forward = Attention(width, num_heads), FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


def linear_layers(*widths: int) -> nn.Sequential:
    """A linear layer with ReLU between every two neighbouring widths."""
    pairs = zip(widths, widths[1:], strict=False)
    return nn.Sequential(*(layer for sizes in pairs for layer in (nn.Linear(*sizes), nn.ReLU())))
