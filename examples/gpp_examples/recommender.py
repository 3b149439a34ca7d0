"""A recommender (DLRM): will this person click? One tower per category, one for numbers, products of all, and a trunk.

The clicks are drawn from a model of their own: every category has a hidden vector, and what fits together is clicked.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics.classification import BinaryAUROC

from gpp_examples.common import Loaders, one_cycle


class Clicks(Loaders):
    """Samples `(numbers [8] float, categories [num_features] int64, clicked [] float)`; 16,384 / 2,048 / 4,096."""

    def __init__(self, batch_size: int = 256, num_features: int = 8, num_categories: int = 16, seed: int = 0) -> None:
        super().__init__(batch_size)
        self.num_features = num_features
        self.num_categories = num_categories
        self.seed = seed

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        hidden = torch.randn(self.num_features, self.num_categories, 4, generator=generator)
        weights = torch.randn(8, generator=generator)
        numbers = torch.randn(22528, 8, generator=generator)
        categories = torch.randint(self.num_categories, (22528, self.num_features), generator=generator)
        chosen = hidden[torch.arange(self.num_features), categories]
        fits = chosen.sum(1).square().sum(1) - chosen.square().sum((1, 2))  # the products of all pairs, twice
        score = 3 * fits / fits.std() + numbers @ weights / weights.norm()
        clicked = torch.rand(22528, generator=generator) < score.sigmoid()
        self.training, self.validation, self.test = (
            TensorDataset(*parts)
            for parts in zip(
                *(values.split([16384, 2048, 4096]) for values in (numbers, categories, clicked.float())), strict=True
            )
        )


def perceptron(*sizes: int) -> nn.Sequential:
    layers = [
        layer for inner, outer in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(inner, outer), nn.GELU())
    ]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Logits `[batch]` of numbers `[batch, 8]` and categories `[batch, num_features]`."""

    def __init__(self, num_features: int, num_categories: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.numbers = perceptron(8, *[width] * num_layers)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Embedding(num_categories, width), perceptron(*[width] * (num_layers + 1)))
            for _ in range(num_features)
        )
        pairs = (num_features + 1) * num_features // 2
        self.trunk = perceptron(width + pairs, *[width] * num_layers, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.numbers(numbers)
        sparse = [tower(categories[:, feature]) for feature, tower in enumerate(self.towers)]
        vectors = torch.stack([dense, *sparse], dim=1)
        products = vectors @ vectors.transpose(1, 2) / vectors.shape[-1] ** 0.5
        row, column = torch.triu_indices(len(sparse) + 1, len(sparse) + 1, offset=1)
        return self.trunk(torch.cat([dense, products[:, row, column]], dim=1)).squeeze(1)


class Recommender(L.LightningModule):
    """Predicts clicks.

    Stated quality: an area under the ROC curve of at least 0.87 on the test set with `experiment=recommender`.
    """

    def __init__(
        self,
        num_features: int = 8,
        num_categories: int = 16,
        width: int = 32,
        num_layers: int = 2,
        learning_rate: float = 1e-2,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = DLRM(num_features, num_categories, width, num_layers)
        self.area = BinaryAUROC()

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        numbers, categories, clicked = batch
        loss = F.binary_cross_entropy_with_logits(self.network(numbers, categories), clicked)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self.area(self.network(batch[0], batch[1]), batch[2].int())
        self.log("val/area", self.area, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self.area(self.network(batch[0], batch[1]), batch[2].int())
        self.log("test/area", self.area)

    def configure_optimizers(self) -> Any:
        return one_cycle(self)
