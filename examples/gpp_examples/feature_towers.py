"""Three towers and a trunk: is this tumour benign?

scikit-learn's breast-cancer data describe cell nuclei by ten quantities, each as a mean, as an error and as a worst
value. Each of the three groups has a tower of its own.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics.classification import BinaryAccuracy

from gpp_examples.common import Loaders

NUM_FEATURES = 10


class BreastCancer(Loaders):
    """Samples `(mean [10], error [10], worst [10], benign [])`, all float, standardised; 369 / 80 / 120 samples."""

    def __init__(self, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__(batch_size)
        self.seed = seed

    def setup(self, stage: str) -> None:
        features, labels = load_breast_cancer(return_X_y=True)
        order = np.random.default_rng(self.seed).permutation(len(features))
        test, validation, training = np.split(order, [120, 200])
        features = (features - features[training].mean(0)) / features[training].std(0)
        self.training, self.validation, self.test = (
            dataset(features[rows], labels[rows]) for rows in (training, validation, test)
        )


def dataset(features: np.ndarray, labels: np.ndarray) -> TensorDataset:
    groups = np.split(features, 3, axis=1)
    return TensorDataset(*(torch.tensor(values, dtype=torch.float32) for values in (*groups, labels)))


class Tower(nn.Sequential):
    """From `[batch, 10]` to `[batch, width]`."""

    def __init__(self, width: int, num_layers: int) -> None:
        sizes = [NUM_FEATURES, *[width] * num_layers]
        layers = [
            layer for i in range(num_layers) for layer in (nn.Linear(sizes[i], width), nn.LayerNorm(width), nn.GELU())
        ]
        super().__init__(*layers)


class FeatureTowers(L.LightningModule):
    """Judges benign or malignant from three groups of features.

    Stated quality: at least 0.95 accuracy on the test set with `experiment=feature_towers`.
    """

    def __init__(self, width: int = 32, num_layers: int = 3, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.mean_tower = Tower(width, num_layers)
        self.error_tower = Tower(width, num_layers)
        self.worst_tower = Tower(width, num_layers)
        self.trunk = nn.Sequential(nn.Linear(3 * width, width), nn.GELU(), nn.Linear(width, 1))
        self.val_accuracy = BinaryAccuracy()
        self.test_accuracy = BinaryAccuracy()

    def forward(self, mean: Tensor, error: Tensor, worst: Tensor) -> Tensor:
        """Logits `[batch]`."""
        joined = torch.cat([self.mean_tower(mean), self.error_tower(error), self.worst_tower(worst)], dim=1)
        return self.trunk(joined).squeeze(1)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        *features, benign = batch
        logits = self(*features)
        loss = F.binary_cross_entropy_with_logits(logits, benign.to(logits.dtype))
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        *features, benign = batch
        logits = self(*features)
        self.val_accuracy(logits, benign.int())
        self.log("val/loss", F.binary_cross_entropy_with_logits(logits, benign.to(logits.dtype)))
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        *features, benign = batch
        self.test_accuracy(self(*features), benign.int())
        self.log("test/accuracy", self.test_accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}
