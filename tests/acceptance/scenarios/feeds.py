"""Data loaders and batches of all forms."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from tests.acceptance.scenarios.base import (
    Chain,
    Facts,
    Make,
    build,
    data,
    facts_of,
    family,
    fitted,
    loader,
    scenario,
)


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Any:
        yield from data()


class Batches:
    """An iterable of batches without a length."""

    def __iter__(self) -> Any:
        yield from loader()


class Sized(Batches):
    def __len__(self) -> int:
        return 3


def _generator(**options: Any) -> torch.Generator:
    return torch.Generator().manual_seed(7)


_LOADERS: dict[str, Any] = {
    "shuffled": lambda: loader(shuffle=True),
    "own_generator": lambda: loader(shuffle=True, generator=_generator()),
    "dropped_last": lambda: loader(drop_last=True),
    "single_samples": lambda: loader(5, batch_size=1),
    "stream": lambda: DataLoader(Stream(), batch_size=8),
    "batches": Batches,
    "sized_batches": Sized,
    "random_sampler": lambda: loader(sampler=RandomSampler(data(), num_samples=16, generator=_generator())),
    "weighted_sampler": lambda: loader(sampler=WeightedRandomSampler(torch.ones(22), 16, generator=_generator())),
    "one_batch": lambda: loader(8),
    "uneven": lambda: loader(17),
}


def _fed(make: Make, folder: Path, name: str) -> Facts:
    torch.manual_seed(11)
    return fitted(make, train=_LOADERS[name]())


family("loader", _fed, {name: {"name": name} for name in _LOADERS})


@scenario
def read_once(make: Make, folder: Path) -> Facts:
    """A generator ends after the first epoch."""
    return fitted(make, train=(batch for batch in loader()), max_epochs=1)


@scenario
def read_once_for_validation(make: Make, folder: Path) -> Facts:
    module, trainer = build(), make(num_sanity_val_steps=0, max_epochs=1)
    trainer.fit(module, loader(), (batch for batch in loader(10, seed=2)))
    return facts_of(trainer, module)


def _collate(form: str) -> Any:
    forms = {
        "dict": lambda x, y: {"x": x, "y": y, "name": "batch"},
        "nested": lambda x, y: {"in": [x, {"deep": x}], "y": y},
        "named": Named,
        "data_class": Pair,
        "texts": lambda x, y: (x, y, [f"sample {i}" for i in range(len(x))]),
        "with_none": lambda x, y: (x, None, y),
        "with_numbers": lambda x, y: (x, 2.5, y),
        "own_class": Own,
        "lists_of_samples": lambda x, y: (list(x), list(y)),
    }
    return lambda samples: forms[form](torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples]))


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Own:
    """A batch class with a method `to`."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> Own:
        return Own(self.x.to(device), self.y.to(device))


class Takes(Chain):
    """Takes batches of any form."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(self.x_of(batch)))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), batch_size=len(self.x_of(batch)))

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self(self.x_of(batch)), self.y_of(batch))

    def x_of(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return batch["x"] if "x" in batch else batch["in"][1]["deep"]
        x = batch.x if hasattr(batch, "x") else batch[0]
        return torch.stack(x) if isinstance(x, list) else x

    def y_of(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return batch["y"]
        if hasattr(batch, "y"):
            return batch.y
        y = batch[2] if len(batch) == 3 and isinstance(batch[2], torch.Tensor) else batch[1]
        return torch.stack(y) if isinstance(y, list) else y


def _formed(make: Make, folder: Path, form: str) -> Facts:
    module, trainer = build(Takes), make()
    trainer.fit(module, loader(collate_fn=_collate(form)), loader(10, seed=2, collate_fn=_collate(form)))
    return facts_of(trainer, module)


_FORMS = (
    "dict",
    "nested",
    "named",
    "data_class",
    "texts",
    "with_none",
    "with_numbers",
    "own_class",
    "lists_of_samples",
)
family("batch", _formed, {form: {"form": form} for form in _FORMS})


class Combined(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [part for part in (batch.values() if isinstance(batch, dict) else batch) if part is not None]
        loss = sum(self.loss(part) for part in parts)
        self.log("train_loss", loss)
        return loss


def _combined(make: Make, folder: Path, mode: str) -> Facts:
    both = CombinedLoader({"a": loader(16), "b": loader(16, seed=5)}, mode)
    return fitted(make, build(Combined), train=both)


family("combined", _combined, {mode: {"mode": mode} for mode in ("min_size", "max_size_cycle", "max_size")})


class Module(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def prepare_data(self) -> None:
        self.seen.append("prepare")

    def setup(self, stage: str) -> None:
        self.seen.append(f"setup {stage}")

    def train_dataloader(self) -> Any:
        self.seen.append("train")
        return loader(shuffle=True)

    def val_dataloader(self) -> Any:
        self.seen.append("val")
        return loader(10, seed=2)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 1.5, batch[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": len(self.seen)}

    def teardown(self, stage: str) -> None:
        self.seen.append(f"teardown {stage}")


@scenario
def data_module(make: Make, folder: Path) -> Facts:
    torch.manual_seed(4)
    module, trainer, given = build(), make(), Module()
    trainer.fit(module, datamodule=given)
    return {
        **facts_of(trainer, module),
        "zero given": sorted(given.seen),
        "setups": [s for s in given.seen if "setup" in s],
    }


@scenario
def no_batches(make: Make, folder: Path) -> Facts:
    return fitted(make, train=[])


@scenario
def no_validation_batches(make: Make, folder: Path) -> Facts:
    return fitted(make, val=[])
