"""A small vision-language model: an image tower (ViT) looks at a digit, a decoder (GPT-2) writes a caption.

The caption names the digit, and whether it is odd. Captions have different lengths, and the decoder predicts the next
byte of each: micro-batches count by their bytes (`strategy.loss_reduction=labels`).
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchmetrics.aggregation import MeanMetric
from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

from gpp_examples.digits import digits
from gpp_examples.two_tower import WORDS

PAD, END = 0, 1
"""Tokens beside bytes."""


def caption(label: int) -> str:
    return f"{WORDS[label]}, {'an odd' if label % 2 else 'an even'} digit"


def collate(samples: list[tuple[Tensor, str]]) -> dict[str, Tensor]:
    images, captions = zip(*samples, strict=True)
    texts = [torch.tensor([*text.encode(), END]) for text in captions]
    return {"pixel_values": torch.stack(images), "labels": pad_sequence(texts, batch_first=True, padding_value=-100)}


class CaptionedDigits(L.LightningDataModule):
    """Mini-batches of `pixel_values` `[batch, 1, 8, 8]`, `labels` `[batch, bytes]`; 1,197 / 200 / 400 images."""

    def __init__(self, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed

    def setup(self, stage: str) -> None:
        self.training, self.validation, self.test = (
            [(image, caption(int(label))) for image, label in zip(*part, strict=True)] for part in digits(self.seed)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True, collate_fn=collate)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.validation, self.batch_size, collate_fn=collate)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, self.batch_size, collate_fn=collate)


class Captioner(L.LightningModule):
    """Writes captions of digits.

    Stated quality: at least 0.85 of the test set's captions without a mistake with `experiment=captioning`.
    """

    def __init__(self, width: int = 64, num_layers: int = 2, num_heads: int = 4, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        image = ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
        )
        text = GPT2Config(
            vocab_size=128,
            n_positions=32,
            n_embd=width,
            n_layer=num_layers,
            n_head=num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=END,
            eos_token_id=END,
            use_cache=False,
        )
        config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            image, text, pad_token_id=PAD, decoder_start_token_id=PAD
        )
        self.model = VisionEncoderDecoderModel(config)
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
        """Whether greedy decoding writes each caption right `[batch]`: each byte is likeliest after those before."""
        likeliest, labels = self.model(**batch).logits.argmax(-1), batch["labels"]
        return ((likeliest == labels) | (labels == -100)).all(1).float()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.learning_rate, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
