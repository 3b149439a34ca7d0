"""CLIP: an image tower and a text tower learn which caption of a mini-batch belongs to which image.

The towers are those of `transformers`. The loss compares every image with every caption, so the step runs as a whole
(`strategy.step=whole`): the towers compute micro-batches side by side, the loss sees all samples.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPVisionConfig, CLIPVisionModelWithProjection

from gpp_examples.common import Loaders, one_cycle
from gpp_examples.digits import digits
from gpp_examples.two_tower import TEMPLATES, caption

END = 255
"""The last token of a caption, which CLIP takes the caption's vector from; the others are bytes."""


def tokens(label: int, template: int) -> list[int]:
    """The caption's bytes, its end, and zeros."""
    text = caption(label, template)
    length = len(bytes(text).rstrip(b"\0"))
    return [*text[:length], END, *text[length:]]


class CaptionedDigits(Loaders):
    """Samples `(image [1, 8, 8] float, caption [21] int64, label [] int64)`; 1,197 / 200 / 400 images."""

    def __init__(self, batch_size: int = 64, seed: int = 0) -> None:
        super().__init__(batch_size, drop_last=True)
        self.seed = seed

    def setup(self, stage: str) -> None:
        self.training, self.validation, self.test = (self.captioned(*part) for part in digits(self.seed))

    def captioned(self, images: Tensor, labels: Tensor) -> TensorDataset:
        templates = torch.randint(len(TEMPLATES), labels.shape, generator=torch.Generator().manual_seed(self.seed))
        texts = [tokens(int(label), int(template)) for label, template in zip(labels, templates, strict=True)]
        return TensorDataset(images, torch.tensor(texts), labels)


class Towers(nn.Module):
    """The two towers of CLIP, called together: so they compute side by side."""

    def __init__(self, width: int, num_layers: int, num_heads: int, projection: int) -> None:
        super().__init__()
        sizes = {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "projection_dim": projection,
        }
        text = CLIPTextConfig(
            vocab_size=256, max_position_embeddings=32, eos_token_id=END, bos_token_id=1, pad_token_id=0, **sizes
        )
        image = CLIPVisionConfig(image_size=8, patch_size=2, num_channels=1, **sizes)
        self.image = CLIPVisionModelWithProjection(image)
        self.text = CLIPTextModelWithProjection(text)

    def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of length 1, `[batch, projection]` each."""
        image, text = self.image(pixel_values=images).image_embeds, self.text(input_ids=captions).text_embeds
        return F.normalize(image, dim=1), F.normalize(text, dim=1)


class CLIP(L.LightningModule):
    """Learns which caption belongs to which image.

    Stated quality: an image is given the right one of ten captions in at least 0.93 of the test set, without a
    classifier ("zero-shot"), with `experiment=clip`.
    """

    def __init__(
        self,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        projection: int = 32,
        learning_rate: float = 4e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.towers = Towers(width, num_layers, num_heads, projection)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        images, captions, _ = batch
        image, text = self.towers(images, captions)
        logits = self.scale.exp() * image @ text.T
        own = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self.accuracy(self.similarities(batch[0]), batch[2])
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self.accuracy(self.similarities(batch[0]), batch[2])
        self.log("test/accuracy", self.accuracy)

    def similarities(self, images: Tensor) -> Tensor:
        """How much each image is like each of "a zero" to "a nine", `[batch, 10]`."""
        captions = torch.tensor([tokens(label, 0) for label in range(10)], device=images.device)
        image = self.towers.image(pixel_values=images).image_embeds
        return image @ F.normalize(self.towers.text(input_ids=captions).text_embeds, dim=1).T

    def configure_optimizers(self) -> Any:
        return one_cycle(self)
