"""A small vision-language model: an image tower (ViT) looks at a digit, a decoder (GPT-2) writes a caption.

The caption names the digit, and whether it is odd. Captions have different lengths, and the decoder predicts the next
byte of each: micro-batches count by their bytes (`strategy.loss_reduction=labels`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

from gpp_examples.common import Loaders, Writer
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


class CaptionedDigits(Loaders):
    """Mini-batches of `pixel_values` `[batch, 1, 8, 8]`, `labels` `[batch, bytes]`; 1,197 / 200 / 400 images."""

    def __init__(self, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__(batch_size, collate, drop_last=True)
        self.seed = seed

    def setup(self, stage: str) -> None:
        self.training, self.validation, self.test = (
            [(image, caption(int(label))) for image, label in zip(*part, strict=True)] for part in digits(self.seed)
        )


class Captioner(Writer):
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
