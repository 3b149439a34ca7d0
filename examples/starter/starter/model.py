"""The network and its training: plain Lightning, which knows nothing of stages."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy


class TwoTowers(L.LightningModule):
    """Classifies pairs of a vector and a text: one tower each, and a head that joins them.

    Args:
        width: features of each tower.
        num_layers: layers of each tower.
        num_classes: classes of the data.
        learning_rate: step size of AdamW.
    """

    def __init__(
        self, width: int = 64, num_layers: int = 4, num_classes: int = 10, learning_rate: float = 1e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.vector_tower = nn.Sequential(nn.Linear(64, width), *layers(width, num_layers))
        self.text_tower = nn.Sequential(nn.EmbeddingBag(100, width), *layers(width, num_layers))
        self.head = nn.Linear(2 * width, num_classes)
        self.val_accuracy, self.test_accuracy = MulticlassAccuracy(num_classes), MulticlassAccuracy(num_classes)

    def forward(self, vector: Tensor, text: Tensor) -> Tensor:
        joined: Tensor = self.head(torch.cat([self.vector_tower(vector), self.text_tower(text)], dim=1))
        return joined

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        vector, text, label = batch
        loss = F.cross_entropy(self(vector, text), label)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        vector, text, label = batch
        self.val_accuracy(self(vector, text), label)
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        vector, text, label = batch
        self.test_accuracy(self(vector, text), label)
        self.log("test/accuracy", self.test_accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        vector, text, _ = batch
        return self(vector, text).argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


def layers(width: int, number: int) -> list[nn.Module]:
    return [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(number)]
