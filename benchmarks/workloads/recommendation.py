"""Models with a branch per feature: a deep learning recommendation model, and CANDLE-Uno."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.layers import Trained, linear_layers
from benchmarks.workloads.transformers import PAPER
from benchmarks.workloads.workload import Built, Workload

WIDTH, NUM_LAYERS = 4096, 4
ROWS, EMBEDDING_WIDTH, BAG = 1_000_000, 64, 100


class FeatureBranches(Trained):
    """A tower of linear layers per dense feature and a table per sparse one; all concatenated go through a trunk.

    Dense features are `[batch, 4096]`, sparse ones bags `[batch, 100]` whose embeddings are concatenated.
    """

    def __init__(self, num_dense: int, num_sparse: int) -> None:
        super().__init__()
        widths = [WIDTH] * (NUM_LAYERS + 1)
        self.towers = nn.ModuleList(linear_layers(*widths) for _ in range(num_dense))
        self.tables = nn.ModuleList(nn.Embedding(ROWS, EMBEDDING_WIDTH) for _ in range(num_sparse))
        self.trunk = linear_layers(num_dense * WIDTH + num_sparse * BAG * EMBEDDING_WIDTH, *widths[1:])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, dense: list[Tensor], sparse: list[Tensor]) -> Tensor:
        towers = [tower(x) for tower, x in zip(self.towers, dense, strict=True)]
        bags = [table(rows).flatten(1) for table, rows in zip(self.tables, sparse, strict=True)]
        return self.head(self.trunk(torch.cat([*towers, *bags], dim=1))).squeeze(1)

    def training_step(self, batch: tuple[list[Tensor], list[Tensor], Tensor], batch_idx: int) -> Tensor:
        dense, sparse, target = batch
        return F.mse_loss(self(dense, sparse), target)


def feature_branches(num_dense: int, num_sparse: int, batch_size: int) -> Built:
    dense = [torch.empty(batch_size, WIDTH) for _ in range(num_dense)]
    sparse = [torch.empty(batch_size, BAG, dtype=torch.long) for _ in range(num_sparse)]
    return FeatureBranches(num_dense, num_sparse), (dense, sparse, torch.empty(batch_size))


def dlrm(batch_size: int = 512) -> Workload:
    """Seven dense features, and seven sparse ones with a million rows of 64 and bags of 100 each."""
    return Workload(
        name="dlrm",
        build=partial(feature_branches, 7, 7, batch_size),
        batch_size=batch_size,
        source=f"{PAPER}, appendix A.2; its text gives no number of layers after the interaction (4 here) and no "
        "mini-batch (chosen here)",
    )


def candle_uno(num_branches: int = 7, batch_size: int = 1024) -> Workload:
    """Towers of four linear layers of 4096, concatenated, and a trunk of four more."""
    return Workload(
        name="candle_uno" if num_branches == 7 else f"candle_uno_{num_branches}",
        build=partial(feature_branches, num_branches, 0, batch_size),
        batch_size=batch_size,
        source=f"{PAPER}, appendix A.2 (7 branches) and section 7.3 (4, 8, 16 branches); its text gives no number of "
        "layers after the concatenation (4 here) and no mini-batch (chosen here)",
    )
