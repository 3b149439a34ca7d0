"""An encoder-decoder (T5): reads a number in words, writes it in digits.

"three hundred and seven thousand and twelve" is 307012. The words of a mini-batch are padded to its longest number,
the labels by -100, so the loss is a mean over digits: micro-batches count by theirs (`strategy.loss_reduction=labels`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import T5Config, T5ForConditionalGeneration

from gpp_examples.common import Loaders, Writer

UNITS = [
    # fmt: off
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    # fmt: on
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
PAD, END = 0, 1
VOCABULARY = {
    word: 2 + index for index, word in enumerate([*"0123456789", *UNITS, *TENS, "hundred", "thousand", "and"])
}


def in_words(number: int) -> list[str]:
    """A number below a million, in English."""
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            joint = ["and"] if 0 < rest < 100 else []
            return [*in_words(number // size), name, *joint, *(in_words(rest) if rest else [])]
    if number < 20:
        return [UNITS[number]]
    return [TENS[number // 10 - 2], *([UNITS[number % 10]] if number % 10 else [])]


def sample(number: int) -> tuple[Tensor, Tensor]:
    """The tokens of words and of digits, each with an end."""
    words, written = ([VOCABULARY[each] for each in text] for text in (in_words(number), str(number)))
    return torch.tensor([*words, END]), torch.tensor([*written, END])


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    words, written = zip(*samples, strict=True)
    tokens = pad_sequence(words, batch_first=True, padding_value=PAD)
    labels = pad_sequence(written, batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": labels}


class Numbers(Loaders):
    """Mini-batches of `input_ids` and `attention_mask` `[batch, words]`, `labels` `[batch, digits]`, all int64.

    The numbers are below a million and occur once: `num_samples` for training, 200 for validation, 1,000 to test.
    """

    def __init__(self, batch_size: int = 64, num_samples: int = 8000, seed: int = 0) -> None:
        super().__init__(batch_size, collate, drop_last=True)
        self.num_samples = num_samples
        self.seed = seed

    def setup(self, stage: str) -> None:
        order = torch.randperm(1_000_000, generator=torch.Generator().manual_seed(self.seed)).tolist()
        samples = [sample(number) for number in order[: self.num_samples + 1200]]
        self.test, self.validation, self.training = samples[:1000], samples[1000:1200], samples[1200:]


class Translator(Writer):
    """Writes numbers in digits.

    Stated quality: at least 0.95 of the test set's numbers without a mistake with `experiment=translation`.
    """

    def __init__(self, width: int = 64, num_layers: int = 2, num_heads: int = 4, learning_rate: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = T5Config(
            vocab_size=2 + len(VOCABULARY),
            d_model=width,
            d_kv=width // num_heads,
            d_ff=4 * width,
            num_layers=num_layers,
            num_heads=num_heads,
            dropout_rate=0.0,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
            use_cache=False,
        )
        self.model = T5ForConditionalGeneration(config)
