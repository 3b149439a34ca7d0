"""The two Transformer models with branches: the multi-modal Transformer and the case study."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.layers import Attention, Block, Trained
from benchmarks.workloads.workload import Built, Workload

PAPER = "GraphPipe (arXiv 2406.17145)"
LENGTH, WIDTH, NUM_HEADS, HIDDEN = 256, 1024, 16, 4096


class Branches(Trained):
    """Independent branches of layers on `[batch, length, width]` each, concatenated by features, and a linear head."""

    def __init__(self, num_branches: int, num_layers: int, layer: Callable[[], nn.Module], width: int = WIDTH) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*(layer() for _ in range(num_layers))) for _ in range(num_branches))
        self.head = nn.Linear(num_branches * width, 1)

    def forward(self, *inputs: Tensor) -> Tensor:
        results = [branch(x) for branch, x in zip(self.branches, inputs, strict=True)]
        return self.head(torch.cat(results, dim=-1)).squeeze(-1)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        *inputs, target = batch
        return F.mse_loss(self(*inputs), target)


class PlainLayer(nn.Module):
    """One multi-head attention and two linear layers, without residual connections and normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(WIDTH, NUM_HEADS)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.attention(x))))


def branches(num_branches: int, num_layers: int, layer: Callable[[], nn.Module], batch_size: int) -> Built:
    inputs = [torch.empty(batch_size, LENGTH, WIDTH) for _ in range(num_branches)]
    return Branches(num_branches, num_layers, layer), (*inputs, torch.empty(batch_size, LENGTH))


def mmt(num_branches: int, batch_size: int = 128) -> Workload:
    """Parallel branches of 8 Transformer layers each: sequence 256, hidden size 1024, 16 heads, feed-forward 4096."""
    return Workload(
        name="mmt" if num_branches == 4 else f"mmt{num_branches}",
        build=partial(branches, num_branches, 8, partial(Block, WIDTH, NUM_HEADS, HIDDEN), batch_size),
        batch_size=batch_size,
        source=f"{PAPER}, appendix A.2 (4 branches) and section 7.2 (2 branches); mini-batch 128 as in section 7.3",
    )


def case_study(batch_size: int = 64) -> Workload:
    """Two branches of four layers, each of one multi-head attention and two linear layers."""
    return Workload(
        name="case_study",
        build=partial(branches, 2, 4, PlainLayer, batch_size),
        batch_size=batch_size,
        source=f"{PAPER}, section 7.5; sizes of the layers as in its multi-modal Transformer, mini-batch chosen here",
    )
