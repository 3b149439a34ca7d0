"""The parts that scenarios share: a small module, its data, and the facts of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Make = Callable[..., pl.Trainer]
"""Makes a trainer: of one process, or of two ranks with the strategy (`gpp=` has options of it)."""
Facts = dict[str, Any]
"""Facts of a run. Names that begin with "zero" are those of global rank 0, on which loggers and writers act."""
Scenario = Callable[[Make, Path], Facts]

SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Register a scenario by the name of its function."""
    return register(function.__name__, function)


def register(name: str, function: Scenario) -> Scenario:
    """Register a scenario.

    Raises:
        KeyError: there is one of this name.
    """
    if name in SCENARIOS:
        raise KeyError(name)
    SCENARIOS[name] = function
    return function


def family(prefix: str, function: Callable[..., Facts], cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Register a scenario for every case: a function with other arguments."""
    for name, arguments in cases.items():
        register(f"{prefix}_{name}", partial(function, **arguments))


class Chain(pl.LightningModule):
    """Two linear layers with a nonlinearity; hooks note what they see. `more`: modules of subclasses, on rank 0."""

    more: tuple[str, ...] = ()

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(6, 2)
        self.lr = lr
        self.losses: list[float] = []
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.losses.append(float("nan") if loss is None else float(loss))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def build(kind: type[Any] = Chain, **options: Any) -> Any:
    """A module whose parameters do not depend on anything else."""
    torch.manual_seed(3)
    return kind(**options).double()


def data(samples: int = 22, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.stack([x.sum(1), x.prod(1)], 1))


def loader(samples: int = 22, batch_size: int = 8, seed: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(samples, seed), batch_size=batch_size, **options)


def fitted(make: Make, module: Any = None, train: Any = None, val: Any = None, **options: Any) -> Facts:
    """Train a module, and return the facts of it."""
    module = build() if module is None else module
    trainer = make(**options)
    trainer.fit(module, loader() if train is None else train, val)
    return facts_of(trainer, module)


def validated(make: Make, module: Any = None, **options: Any) -> Facts:
    """Train a module with validation."""
    return fitted(make, module, val=loader(10, seed=2), **options)


def staged(kind: type[Chain]) -> dict[str, Any]:
    """Options of the strategy for a module of this kind: the first layers on rank 1, all else on rank 0."""
    last = {"modules": ["last", *kind.more, "@step"], "devices": [0]}
    return {"stages": [{"modules": ["first"], "devices": [1]}, last]}


def facts_of(trainer: pl.Trainer, module: Any) -> Facts:
    """All that a run leaves behind."""
    facts: Facts = {
        "metrics": plain(trainer.callback_metrics),
        "logged": plain(trainer.logged_metrics),
        "steps": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        "state": {name: value for name, value in module.state_dict().items() if not value.is_meta},
        "rates": [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers],
    }
    for name in ("losses", "seen"):
        if hasattr(module, name):
            facts[name] = list(getattr(module, name))
    return facts


def plain(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


@contextlib.contextmanager
def caught(*kinds: type[BaseException]) -> Iterator[list[str]]:
    """The types by which the exceptions of the block can be caught, of those given."""
    names: list[str] = []
    try:
        yield names
    except kinds as error:
        names.append(next(kind.__name__ for kind in kinds if isinstance(error, kind)))
