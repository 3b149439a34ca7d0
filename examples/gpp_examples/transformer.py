"""A pre-norm transformer block, shared by the examples."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpp.sequence import causal_attention


class Attention(nn.Module):
    """Multi-head self-attention on `[batch, length, width]`."""

    def __init__(self, width: int, num_heads: int, causal: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.projection_in = nn.Linear(width, 3 * width)
        self.projection_out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` is `[batch, 1, 1, length]`, true where attention may look."""
        batch, length, width = x.shape
        heads = self.projection_in(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if self.causal:
            mixed = causal_attention(query, key, value)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.projection_out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, width: int, num_heads: int, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, causal)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return x + self.dropout(self.perceptron(self.perceptron_norm(x)))
