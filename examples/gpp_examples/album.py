"""A small vision-language model (LLaVA) reads albums of one to three pictures of digits, and writes what it sees.

Albums have different numbers of pictures, which all lie in one tensor, and texts of different lengths. Micro-batches
get the pictures of their samples, and count by the digits that they write (`strategy.loss_reduction=labels:shifted`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from gpp_examples.common import Continuer, Loaders
from gpp_examples.digits import digits

PAD, ANSWER, PICTURE = 10, 11, 12
"""Tokens beside the ten digits: padding, the begin of the answer, and a part of a picture."""
PARTS = 4
"""Parts of a picture, each of which takes the place of a token."""

Album = tuple[Tensor, Tensor]
"""Pictures `[pictures, 3, 8, 8]`, and their digits."""


def albums(images: Tensor, labels: Tensor, generator: torch.Generator) -> list[Album]:
    """Albums of one to three pictures, each picture in one of them."""
    sizes: list[int] = []
    while sum(sizes) < len(labels) - 2:
        sizes.append(int(torch.randint(1, 4, (), generator=generator)))
    order = torch.randperm(len(labels), generator=generator)[: sum(sizes)]
    return [(images[rows].expand(-1, 3, -1, -1), labels[rows]) for rows in order.split(sizes)]


def collate(samples: list[Album]) -> dict[str, Tensor]:
    pictures, answers = zip(*samples, strict=True)
    questions = [torch.full((PARTS * len(answer),), PICTURE) for answer in answers]
    start = torch.tensor([ANSWER])
    texts = [torch.cat([question, start, answer]) for question, answer in zip(questions, answers, strict=True)]
    ids = pad_sequence(texts, batch_first=True, padding_value=PAD)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "pixel_values": torch.cat(pictures),
        "labels": ids.where(ids < PAD, -100),
    }


class Albums(Loaders):
    """Mini-batches of `input_ids`, `attention_mask`, `labels` `[batch, tokens]`, and pictures `[pictures, 3, 8, 8]`."""

    def __init__(self, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__(batch_size, collate, drop_last=True)
        self.seed = seed

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.training, self.validation, self.test = (albums(*part, generator) for part in digits(self.seed))


class Reader(Continuer):
    """Reads the digits of albums.

    Stated quality: at least 0.8 of the test set's albums without a mistake with `experiment=album`.
    """

    def __init__(self, width: int = 64, num_layers: int = 2, num_heads: int = 4, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": num_layers}
        sizes["num_attention_heads"] = num_heads
        config = LlavaConfig(
            vision_config=CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=width),
            text_config=LlamaConfig(
                **sizes,
                num_key_value_heads=num_heads,
                vocab_size=PICTURE + 1,
                max_position_embeddings=32,
                bos_token_id=ANSWER,
                eos_token_id=PAD,
                pad_token_id=PAD,
                use_cache=False,
            ),
            image_token_index=PICTURE,
            vision_feature_layer=-1,
        )
        self.model = LlavaForConditionalGeneration(config)
