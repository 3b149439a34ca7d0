"""The data of an example in the same order in every epoch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from gpp_examples.feature_towers import BreastCancer


class Ordered(BreastCancer):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.training, self.batch_size)
