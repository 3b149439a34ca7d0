"""Ways to write models, optimizers and data that researchers use: runs are those of one process."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics.classification import MulticlassAccuracy

from tests.strategy import harness


class Base(pl.LightningModule):
    """Classifies, by one layer on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=0.05)


class Hypernetwork(Base):
    """Calls a layer with weights that another one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Linear(2, 18)
        self.code = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.made(self.code).view(3, 6)}
        return torch.func.functional_call(self.head, weights, (self.body(x).tanh(),))


class Quantizes(Base):
    """Compares results with the weights of a module, before it calls the module."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        latent = self.body(batch[0])
        nearest = self.codes(torch.cdist(latent, self.codes.weight).argmin(-1))
        logits = self.head(latent + (nearest - latent).detach())
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(nearest, latent.detach())


class Rotates(Base):
    """Has complex weights, whose gradients are clipped with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.body.turn = nn.Parameter(torch.polar(torch.ones(4), torch.arange(4.0)).to(torch.complex128))
        self.body.register_forward_pre_hook(lambda body, args: (args[0] * body.turn.angle().cos(),))


class Lookahead(Optimizer):
    """Wraps an optimizer without `Optimizer.__init__`, as copied in many repositories."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state, self.count = defaultdict(dict), 0
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss, self.count = self.inner.step(closure), self.count + 1
        for parameter in (each for group in self.param_groups for each in group["params"]):
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            if self.count % 2 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss


class LooksAhead(Base):
    def configure_optimizers(self) -> Any:
        return Lookahead(Adam(self.parameters(), lr=0.05))


class Epochs(Sampler[int]):
    """Shuffles by a count of its own."""

    count = 0

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        yield from np.random.default_rng(self.count).permutation(16).tolist()

    def __len__(self) -> int:
        return 16


class Noisy(Dataset[Any]):
    """Augments by generators of its own, one of them of the class."""

    shared = torch.Generator().manual_seed(1)

    def __init__(self) -> None:
        self.own, self.reads = np.random.default_rng(2), [0]

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads[0] += 1
        noise = torch.randn(4, generator=self.shared, dtype=torch.float64) + float(self.own.normal())
        return noise * 0.1 + index % 3 + 0.01 * self.reads[0], index % 3


class Moves(Base):
    """Changes mini-batches on their way to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.moved += 1
        return [batch[0] + self.moved, batch[1]]


class Measures(Base):
    """Keeps metrics and results in parts of the module, and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.body.accuracy, self.body.kept = MulticlassAccuracy(3, average="micro"), []
        self.box = Box()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.body.accuracy.update(logits, batch[1])
        self.box.accuracy.update(logits, batch[1])
        self.body.kept.append(len(logits))
        return F.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self) -> None:
        self.losses += [float(metric.compute()) for metric in (self.body.accuracy, self.box.accuracy)]
        self.losses.append(float(sum(self.body.kept)))


class Box:
    def __init__(self) -> None:
        self.accuracy = MulticlassAccuracy(3, average="micro")


class Twice(Base):
    """Validates by calls that go through the network twice, and by positions in the mini-batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.body(batch[0]).tanh()
        picked = hidden[torch.arange(len(hidden)), batch[1]]
        again = self.body(self.head(hidden * picked[:, None]).repeat(1, 2)[:, :4])
        self.losses.append(float(self.head(again).sum()))


MODULES = {kind.__name__: kind for kind in (Hypernetwork, Quantizes, Rotates, LooksAhead, Moves, Measures, Twice)}


def noisy() -> DataLoader[Any]:
    Noisy.shared.manual_seed(1)
    return DataLoader(Noisy(), batch_size=8, sampler=Epochs())


def trained(devices: int) -> dict[str, list[float]]:
    return {name: losses_of(kind, devices) for name, kind in MODULES.items()}


def trainer_of(devices: int, **options: Any) -> pl.Trainer:
    given = harness.strategy(num_micro_batches=2, stages=None) if devices > 1 else "auto"
    return harness.trainer(given, devices, **options)


def losses_of(kind: type[Base], devices: int) -> list[float]:
    torch.manual_seed(0)
    module = kind().double()
    warnings.filterwarnings("ignore", message="configure_optimizers returned Lookahead")
    trainer_of(devices, max_epochs=3, gradient_clip_val=0.5).fit(module, noisy(), noisy())
    return module.losses


def all_trained(rank: int) -> dict[str, list[float]]:
    return trained(2)


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    return [harness.run(1, trained_alone)[0], harness.run(2, all_trained)[0]]


def trained_alone(rank: int) -> dict[str, list[float]]:
    return trained(1)


@pytest.mark.parametrize("name", MODULES)
def test_a_run_is_that_of_one_process(runs: list[Any], name: str) -> None:
    alone, divided = (run[name] for run in runs)
    assert len(alone) >= 6
    assert divided == pytest.approx(alone, rel=1e-11)


class ByEpoch(Base):
    """Makes its loader for the epoch."""

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        epoch = self.trainer.current_epoch
        return DataLoader([(torch.ones(4, dtype=torch.float64) * epoch, 1)] * 8, batch_size=4)


def resumed(rank: int, devices: int, folder: Path) -> list[float]:
    torch.manual_seed(0)
    first, module = ByEpoch().double(), ByEpoch().double()
    trainer = trainer_of(devices, max_epochs=2)
    trainer.fit(first)
    trainer.save_checkpoint(folder / "it.ckpt")
    trainer_of(devices, max_epochs=3).fit(module, ckpt_path=str(folder / "it.ckpt"), weights_only=False)
    return module.losses


def test_loaders_are_made_for_the_epoch_that_a_run_resumes_at(tmp_path: Path) -> None:
    (alone,) = harness.run(1, resumed, 1, tmp_path)
    assert len(alone) == 2
    assert harness.run(2, resumed, 2, tmp_path)[0] == pytest.approx(alone, rel=1e-11)
