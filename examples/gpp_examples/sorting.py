"""A language model (Llama) on prompts of different lengths: it sorts the digits of a number, `3141=1134`.

Mini-batches are padded to their longest text. Micro-batches take samples of like lengths, without needless padding
(`strategy.micro_batch_by`), and count by the digits that are written (`strategy.loss_reduction`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from gpp_examples.common import Continuer, Loaders

PAD, EQUALS = 10, 11
"""Tokens beside the ten digits."""


def collate(numbers: list[Tensor]) -> dict[str, Tensor]:
    texts = [torch.cat([digits, torch.tensor([EQUALS]), digits.sort().values]) for digits in numbers]
    ids = pad_sequence(texts, batch_first=True, padding_value=PAD)
    written = torch.arange(ids.shape[1]) > torch.tensor([len(digits) for digits in numbers])[:, None]
    mask = ids != PAD
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(written & mask, -100)}


class Numbers(Loaders):
    """Mini-batches of `input_ids`, `attention_mask` and `labels` `[batch, tokens]`: numbers of 2 to 12 digits.

    Args:
        batch_size: numbers of a mini-batch.
        seed: of the numbers.
        sizes: numbers for training, validation and test.
    """

    def __init__(self, batch_size: int = 64, seed: int = 0, sizes: tuple[int, int, int] = (6400, 500, 1000)) -> None:
        super().__init__(batch_size, collate, drop_last=True)
        self.seed, self.sizes = seed, sizes

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        lengths = torch.randint(2, 13, (sum(self.sizes),), generator=generator)
        numbers = [torch.randint(0, 10, (int(length),), generator=generator) for length in lengths]
        self.training, rest = numbers[: self.sizes[0]], numbers[self.sizes[0] :]
        self.validation, self.test = rest[: self.sizes[1]], rest[self.sizes[1] :]


class Sorter(Continuer):
    """Sorts digits.

    Stated quality: at least 0.95 of the test set's numbers without a mistake with `experiment=sorting`.
    """

    def __init__(self, width: int = 64, num_layers: int = 2, num_heads: int = 4, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = LlamaConfig(
            vocab_size=12,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            max_position_embeddings=32,
            pad_token_id=PAD,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)
