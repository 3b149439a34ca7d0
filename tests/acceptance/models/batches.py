"""Mini-batches in forms that collate functions make, beside those of `tests/acceptance/scenarios/feeds.py`."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.acceptance.models.base import Entry, ids, labels, numbers
from tests.acceptance.models.idioms import mlp


class Keys(nn.Module):
    """Reads `batch["x"]` and `batch["y"]`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 16, 8, 3)

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


def _encoding() -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"x": numbers(6), "y": labels()})


class Bags(nn.Module):
    """A bag of words per sample, all words in one tensor, with the offsets of the bags."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.net = nn.EmbeddingBag(32, 8, sparse=True), mlp(8, 16, 3)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(self.bag(batch["words"], batch["offsets"])), batch["y"])


_XY = {"x": numbers(6), "y": labels()}

MODELS: dict[str, Entry] = {
    "batch_encoding": lambda: (Keys(), _encoding()),
    "user_dict": lambda: (Keys(), UserDict(_XY)),
    "bags_with_offsets": lambda: (
        Bags(),
        {"words": ids(20, samples=1)[0], "offsets": torch.tensor([0, 3, 9, 14]), "y": labels()},
    ),
}
