"""The example models with their default settings, and a mini-batch of each."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from gpp_examples.feature_towers import BreastCancer, FeatureTowers
from gpp_examples.gpt_text import GPT, PythonTopics
from gpp_examples.two_tower import CaptionedDigits, TwoTower

EXAMPLES: dict[str, tuple[type[L.LightningModule], type[L.LightningDataModule]]] = {
    "two_tower": (TwoTower, CaptionedDigits),
    "feature_towers": (FeatureTowers, BreastCancer),
    "gpt_text": (GPT, PythonTopics),
}


def model_and_batch(name: str) -> tuple[L.LightningModule, Any]:
    """An example's model and mini-batch, the same in every process."""
    torch.manual_seed(0)
    model_class, data_class = EXAMPLES[name]
    data = data_class()
    data.setup("fit")
    return model_class(), next(iter(data.train_dataloader()))
