"""Mini-batches in all forms that collate functions make."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.acceptance.models.base import B, Entry, ids, labels, numbers
from tests.acceptance.models.idioms import mlp


class Attributes(nn.Module):
    """Reads `batch.x` and `batch.y`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 16, 8, 3)

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch.x), batch.y)


class Keys(Attributes):
    """Reads `batch["x"]` and `batch["y"]`."""

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


@dataclass
class Data:
    x: Tensor
    y: Tensor
    names: list[str]
    scale: float = 1.0


class Named(NamedTuple):
    x: Tensor
    y: Tensor


class Movable:
    """An object with tensors and a method `to`, as libraries for graphs have."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> Movable:
        return Movable(self.x.to(device), self.y.to(device))


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


class Clouds(nn.Module):
    """A list of point clouds of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.head = mlp(3, 16, 16), mlp(16, 8, 3)

    def training_step(self, batch: tuple[list[Tensor], Tensor]) -> Tensor:
        clouds, y = batch
        return F.cross_entropy(self.head(torch.stack([self.local(cloud).amax(0) for cloud in clouds])), y)


class Table(Attributes):
    """Weights of classes, of which there are as many as samples."""

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.net(batch["x"])
        return (F.cross_entropy(out, batch["y"] % 3, reduction="none") * batch["weights"][batch["y"]]).mean()


_XY = {"x": numbers(6), "y": labels()}
_TABLE = {"x": numbers(6), "y": torch.tensor([3, 1, 0, 2]), "weights": torch.arange(1.0, 1.0 + B).double()}

MODELS: dict[str, Entry] = {
    "dataclass": lambda: (Attributes(), Data(**_XY, names=["a", "b", "c", "d"])),
    "named_tuple": lambda: (Attributes(), Named(**_XY)),
    "movable": lambda: (Attributes(), Movable(**_XY)),
    "batch_encoding": lambda: (Keys(), _encoding()),
    "user_dict": lambda: (Keys(), UserDict(_XY)),
    "bags_with_offsets": lambda: (
        Bags(),
        {"words": ids(20, samples=1)[0], "offsets": torch.tensor([0, 3, 9, 14]), "y": labels()},
    ),
    "point_clouds": lambda: (Clouds(), ([numbers(3, samples=5 + n, seed=n) for n in range(B)], labels())),
    "table_of_weights": lambda: (Table(), _TABLE),
    "table_of_weights_told": lambda: (Table(), _TABLE, {"batch_dims": {"weights": None}}),
}
