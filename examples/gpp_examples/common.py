"""Parts that several examples share: loaders, an optimizer with one cycle of its rate, and models that write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.aggregation import MeanMetric


class Loaders(L.LightningDataModule):
    """Loaders of the samples that `setup` puts into `training`, `validation` and `test`.

    Args:
        batch_size: samples of a mini-batch.
        collate: makes mini-batches of samples; None for tensors of one shape.
        drop_last: whether a smaller last mini-batch of training is left out.
    """

    training: Any
    validation: Any
    test: Any

    def __init__(
        self, batch_size: int, collate: Callable[[Sequence[Any]], Any] | None = None, drop_last: bool = False
    ) -> None:
        super().__init__()
        self.batch_size, self.collate, self.drop_last = batch_size, collate, drop_last

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self.training, self.batch_size, shuffle=True, drop_last=self.drop_last, collate_fn=self.collate
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.validation, self.batch_size, collate_fn=self.collate)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, self.batch_size, collate_fn=self.collate)


def one_cycle(module: L.LightningModule, weight_decay: float = 0.01) -> Any:
    """AdamW with one cycle of the learning rate over the run; `hparams.learning_rate` is the highest."""
    rate = module.hparams.learning_rate
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=weight_decay)
    steps = int(module.trainer.estimated_stepping_batches)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Writer(L.LightningModule):
    """Trains `model`, a language model of `transformers`, and counts the answers that it writes without a mistake."""

    model: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.correct = MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.correct(self.without_mistake(batch))
        self.log("val/correct", self.correct, prog_bar=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.correct(self.without_mistake(batch))
        self.log("test/correct", self.correct)

    def without_mistake(self, batch: dict[str, Tensor]) -> Tensor:
        """Whether greedy decoding writes each answer right `[batch]`: each token is likeliest after those before."""
        likeliest, labels = self.model(**batch).logits.argmax(-1), batch["labels"]
        return ((likeliest == labels) | (labels == -100)).all(1).float()

    def configure_optimizers(self) -> Any:
        return one_cycle(self)


class Continuer(Writer):
    """A `Writer` that has a decoder alone: it continues what it reads."""

    def without_mistake(self, batch: dict[str, Tensor]) -> Tensor:
        """Whether greedy decoding continues each text right `[batch]`."""
        likeliest, labels = self.model(**batch).logits[:, :-1].argmax(-1), batch["labels"][:, 1:]
        return ((likeliest == labels) | (labels == -100)).all(1).float()
