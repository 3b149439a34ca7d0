"""Local learning: which digit is this, asked by every part of a vision transformer of its own head.

Each part learns from the loss of its head alone, and hands its result on without a gradient. So a pipeline of the parts
sends nothing back, and none of them waits for those behind it.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from gpp_examples.common import Loaders, one_cycle
from gpp_examples.digits import digits
from gpp_examples.transformer import Block

PATCHES, PATCH_PIXELS = 16, 4


class Digits(Loaders):
    """Samples `(image [1, 8, 8] float, label [] int64)`; 1,197 / 200 / 400 images."""

    def __init__(self, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__(batch_size)
        self.seed = seed

    def setup(self, stage: str) -> None:
        self.training, self.validation, self.test = (TensorDataset(*part) for part in digits(self.seed))


class Patches(nn.Module):
    """From `[batch, 1, 8, 8]` to vectors of patches of 2 x 2 pixels, `[batch, 16, width]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(PATCH_PIXELS, width)
        self.position = nn.Parameter(0.02 * torch.randn(PATCHES, width))

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, PATCHES, PATCH_PIXELS)
        return self.projection(pixels) + self.position


class Head(nn.Module):
    """From vectors of patches to the loss if there are labels, else to logits `[batch, 10]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, 10)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.linear(self.norm(hidden).mean(1))
        return logits if labels is None else F.cross_entropy(logits, labels)


class LocalDigits(L.LightningModule):
    """Reads digits with a transformer of `num_parts` parts, each with a loss; with one part it learns end to end.

    Stated quality: at least 0.93 accuracy on the test set with `experiment=local_digits`.
    """

    def __init__(
        self,
        width: int = 64,
        num_blocks: int = 8,
        num_heads: int = 4,
        num_parts: int = 4,
        learning_rate: float = 2e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        per_part = num_blocks // num_parts
        self.patches = Patches(width)
        self.parts = nn.ModuleList(
            nn.Sequential(*(Block(width, num_heads) for _ in range(per_part))) for _ in range(num_parts)
        )
        self.heads = nn.ModuleList(Head(width) for _ in range(num_parts))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """The logits of the last head, `[batch, 10]`."""
        hidden = self.patches(images)
        for part in self.parts:
            hidden = part(hidden)
        return self.heads[-1](hidden)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        hidden, losses = self.patches(images), []
        for part, head in zip(self.parts, self.heads, strict=True):
            hidden = part(hidden)
            losses.append(head(hidden, labels))
            hidden = hidden.detach()
        self.log("train/loss", losses[-1], prog_bar=True)
        return sum(losses)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("val/loss", F.cross_entropy(logits, batch[1]))
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("test/accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        return one_cycle(self)
