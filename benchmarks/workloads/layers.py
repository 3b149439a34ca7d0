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
    """Multi-head attention of `[batch, length, width]` on itself or on `memory`, without biases."""

    def __init__(self, width: int, num_heads: int, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.value, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, angles: Tensor | None = None) -> Tensor:
        """`angles` `[length, width / num_heads / 2]` turn queries and keys by their positions."""
        read = x if memory is None else memory
        query, key, value = self._heads(self.query(x)), self._heads(self.key(read)), self._heads(self.value(read))
        if angles is not None:
            query, key = turned(query, angles), turned(key, angles)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding: pairs of features turned by `angles`."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class FeedForward(nn.Module):
    """Up, GELU, down, without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm Transformer layer; with `feed_forward`, that in place of the two linear layers."""

    def __init__(
        self, width: int, num_heads: int, hidden: int, causal: bool = False, feed_forward: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, num_heads, causal)
        self.feed_forward = FeedForward(width, hidden) if feed_forward is None else feed_forward

    def forward(self, x: Tensor, angles: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles=angles)
        return x + self.feed_forward(self.feed_forward_norm(x))


def linear_layers(*widths: int) -> nn.Sequential:
    """A linear layer with ReLU between every two neighbouring widths."""
    pairs = zip(widths, widths[1:], strict=False)
    return nn.Sequential(*(layer for sizes in pairs for layer in (nn.Linear(*sizes), nn.ReLU())))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of `[batch, length, vocabulary]` against `[batch, length]`."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
