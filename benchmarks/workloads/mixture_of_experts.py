"""A Transformer whose layers hold eight experts each: eight parallel branches per layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.workloads.layers import Block, FeedForward, Trained, next_token_loss
from benchmarks.workloads.workload import Built, Workload

WIDTH, NUM_HEADS, HIDDEN, NUM_LAYERS, NUM_EXPERTS, VOCABULARY, LENGTH = 1024, 16, 4096, 12, 8, 32000, 512


class Experts(nn.Module):
    """Feed-forward layers weighted by a softmax gate.

    Routing is dense: every expert computes every position, so that all shapes are known before the run. That is the
    mixture of Jacobs et al. (1991), and the upper bound of what sparse routing computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(FeedForward(WIDTH, HIDDEN) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1).unbind(-1)
        results = [expert(x) * weight.unsqueeze(-1) for expert, weight in zip(self.experts, weights, strict=True)]
        return torch.stack(results).sum(0)


class MixtureOfExperts(Trained):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            Block(WIDTH, NUM_HEADS, HIDDEN, causal=True, feed_forward=Experts()) for _ in range(NUM_LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        return next_token_loss(self(tokens[:, :-1]), tokens[:, 1:])


def build(batch_size: int) -> Built:
    return MixtureOfExperts(), (torch.empty(batch_size, LENGTH + 1, dtype=torch.long),)


def mixture_of_experts(batch_size: int = 128) -> Workload:
    return Workload(
        name="mixture_of_experts",
        build=partial(build, batch_size),
        batch_size=batch_size,
        source="R. Jacobs et al., Adaptive mixtures of local experts (Neural Computation 3, 1991) in place of the "
        "feed-forward layers; eight experts as in Mixtral (arXiv 2401.04088); other sizes chosen here",
    )
