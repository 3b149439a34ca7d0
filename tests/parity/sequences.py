"""Models of sequences in eight blocks, of which later tokens depend on earlier ones: they can be cut into slices."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpp.sequence import carry, causal_attention, positions

WIDTH, HEADS, TOKENS, OTHER_TOKENS = 8, 2, 8, 5

Batch = tuple[Tensor, Tensor, Tensor]
"""Two inputs and a target: (samples, TOKENS, WIDTH), (samples, OTHER_TOKENS, WIDTH), (samples, TOKENS, WIDTH)."""


class CausalBlock(nn.Module):
    """A token's place counts, all tokens of another sequence where there is one, the tokens before it by attention, and
    their mean, which carries another kind of tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Linear(1, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        x = x + self.places(positions(x)[:, None].to(x.dtype) / TOKENS)
        for other in others:
            x = x + torch.softmax(x @ other.mT, -1) @ other
        samples, tokens, _ = x.shape
        heads = self.heads(self.norm(x)).view(samples, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        x = x + causal_attention(query, key, value).transpose(1, 2).reshape(samples, tokens, WIDTH)
        x = x + _mean_so_far(x)
        return x + self.outer(F.gelu(self.inner(x)))


def _mean_so_far(x: Tensor) -> Tensor:
    sums = carry(x).cumsum(1)[:, -x.size(1) :]
    return sums / (1 + positions(x))[:, None]


class PlainBlock(nn.Module):
    """Mixes all tokens with each other, later ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.softmax(x @ x.mT, -1) @ torch.tanh(self.inner(x))


class Sequence(nn.Module):
    """The step that all models share."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        first, second, target = batch
        return F.mse_loss(self(first, second), target)


class Decoder(Sequence):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CausalBlock() for _ in range(8))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        for block in self.blocks:
            first = block(first)
        return first


class Translator(Sequence):
    """The encoder sees all of its sequence, so it stays whole, and every slice of the decoder reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(PlainBlock() for _ in range(4))
        self.decoder = nn.ModuleList(CausalBlock() for _ in range(4))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        for block in self.encoder:
            second = block(second)
        for block in self.decoder:
            first = block(first, second)
        return first
