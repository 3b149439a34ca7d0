"""Made-up samples of ten classes: a noisy vector of 64 numbers, and a text of eight tokens out of 100."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES, NUM_TOKENS = 10, 100


class Pairs(L.LightningDataModule):
    """Samples `(vector [64] float, text [8] int64, label [] int64)`.

    Args:
        batch_size: samples of a mini-batch.
        num_samples: samples for training; a quarter as many each are for validation and for the test.
    """

    def __init__(self, batch_size: int = 64, num_samples: int = 4096) -> None:
        super().__init__()
        self.batch_size, self.num_samples = batch_size, num_samples

    def setup(self, stage: str) -> None:
        centres = torch.randn(NUM_CLASSES, 64, generator=torch.Generator().manual_seed(0))
        self.training = samples(centres, self.num_samples, seed=1)
        self.validation = samples(centres, self.num_samples // 4, seed=2)
        self.test = samples(centres, self.num_samples // 4, seed=3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.training, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.validation, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.test_dataloader()


def samples(centres: torch.Tensor, number: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (number,), generator=generator)
    vectors = centres[labels] + 2 * torch.randn(number, 64, generator=generator)
    texts = torch.randint(NUM_TOKENS // 2, (number, 8), generator=generator) + 5 * labels[:, None]
    return TensorDataset(vectors, texts, labels)
