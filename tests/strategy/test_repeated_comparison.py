"""Losses that turn out to be no means over samples only while training goes on; and what the comparison must not touch.

Every case is trained with the comparison and without it: losses, parameters and whatever the module keeps are equal.
"""

from __future__ import annotations

import random
import time
import warnings
from collections import deque
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from tests.strategy import harness


def stages_of(module: Module) -> list[dict[str, Any]]:
    return [{"modules": names, "devices": [1 - number]} for number, names in enumerate(module.stages)]


class Module(pl.LightningModule):
    """A classifier that keeps the losses of mini-batches. `stages`: the modules on device 1 and on device 0."""

    stages = ["left"], ["head", "@step"]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.head = self.made_head()
        self.losses: list[float] = []

    def made_head(self) -> nn.Module:
        return nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.head(self.left(batch[0])), batch[1])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def kept(self) -> Any:
        """Values that runs of the step change."""
        return None


class Weighted(Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, weight=self.weights)


class WeightedByModule(Module):
    """The weights are a buffer of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.criterion(logits, labels)
        return loss


class Centres(nn.Module):
    """A loss with parameters, as in metric learning."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 3))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.normalize(logits) @ F.normalize(self.centres).T, labels)


class LossModule(Module):
    """A module computes one term of the loss, the step another one."""

    stages = ["left"], ["head", "criterion", "@step"]

    def __init__(self) -> None:
        super().__init__()
        self.criterion = Centres()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.criterion(logits, labels)
        return loss + logits.square().mean()


class LogsSpread(Module):
    """Logs a value that is no mean over samples, and one that is; the clock counts as neither."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.left(batch[0]))
        self.log_dict({"spread": logits.std(), "mean": logits.mean(), "clock": time.perf_counter()})
        return self.loss(logits, batch[1])


class Phase(Module):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        later = (logits @ logits.T).logsumexp(1).mean() if self.current_epoch > 0 else 0.0
        return super().loss(logits, labels) + later


class WithLoss(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(self.body(x).tanh())
        return {"loss": F.cross_entropy(logits.view(-1, 3).float(), labels.view(-1)), "logits": logits}


class Transformer(Module):
    """The whole network is one module, which is cut, and whose loss the step returns."""

    stages = ["net.body"], ["net.out", "@step"]

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Identity()
        self.head = nn.Identity()
        self.net = WithLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0].repeat(1, 2)[:, :6], batch[1])["loss"]


class Dropped(Module):
    def made_head(self) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))


class Normed(Module):
    def made_head(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))


class Glued(Module):
    """Several network calls, with operators of the step in between, and a squared error."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        middle = self.left(batch[0])
        return F.mse_loss(self.head(middle * 2 + middle.mean(1, keepdim=True)), batch[0][:, :3]) + middle.abs().mean()


class Noisy(Module):
    """Draws noise, of torch for every sample, of NumPy and Python for all together; and drops."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        scale = 1 + 0.1 * np.random.rand() + 0.1 * random.random()
        return super().loss(F.dropout(scale * logits + torch.randn_like(logits), 0.3), labels)


class NumpyNoise(Module):
    """Draws as many numbers as there are samples, so that parts have no share."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits + torch.from_numpy(np.random.randn(*logits.shape)), labels)


class Demanding(Module):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if len(labels) != 4:
            raise ValueError("four samples, please")
        return F.cross_entropy(logits, labels, ignore_index=0)


class Average:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


class Bookkeeping(Module):
    """Keeps all kinds of things, and draws from its own and from the process's streams."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.calls, self.table = 0, {"a": [0]}
        self.average, self.latest, self.numbers = Average(), deque([0.0], maxlen=3), np.zeros(2)
        self.of_samples, self.drawn = torch.zeros(3, dtype=torch.float64), list[float]()
        self.generator, self.own = torch.Generator(), np.random.default_rng(0)
        self.register_buffer("updates", torch.zeros((), dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = super().loss(logits, labels)
        self._keep(loss.item(), labels)
        self.drawn += [random.random(), float(np.random.rand()), float(torch.rand(()))]
        self.drawn += [float(torch.rand((), generator=self.generator)), self.own.random()]
        self.accuracy.update(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_epoch=True)
        return loss

    def _keep(self, value: float, labels: Tensor) -> None:
        self.calls += 1
        self.table["a"].append(self.calls)
        self.average.add(value)
        self.latest.append(value)
        self.numbers += value
        self.of_samples[labels] += value
        self.updates.add_(1)
        with torch.no_grad():
            self.scale.mul_(1.5)

    def kept(self) -> Any:
        mine = self.calls, self.table, vars(self.average), list(self.latest), self.numbers.tolist(), self.drawn
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        return *mine, self.of_samples.tolist(), logged


def labels_of(kind: str) -> Tensor:
    """Labels of four mini-batches of eight samples, of which the first four show nothing."""
    labels = torch.randint(0, 3, (32,), generator=torch.Generator().manual_seed(2))
    labels[:4] = 1
    if kind == "ignored":
        labels[6:8] = -100
    if kind == "all ignored":
        labels[12:16] = -100
    return labels


KINDS: dict[str, tuple[type[Module], str]] = {
    "ignored labels": (Module, "ignored"),
    "weights": (Weighted, ""),
    "weights of a module": (WeightedByModule, ""),
    "phase": (Phase, ""),
    "padded": (Transformer, "ignored"),
    "all ignored": (Module, "all ignored"),
    "mean": (Module, ""),
    "module with a loss": (LossModule, ""),
    "mean in the network": (Transformer, ""),
    "dropout": (Dropped, ""),
    "norm": (Normed, ""),
    "glue": (Glued, ""),
    "noise": (Noisy, ""),
    "noise of NumPy": (NumpyNoise, ""),
    "fails on others": (Demanding, ""),
    "bookkeeping": (Bookkeeping, ""),
}
WARNED = {"ignored labels": 0, "weights": 1, "weights of a module": 1, "phase": 4, "padded": 0, "all ignored": 1}
"""The mini-batch in which a warning comes."""


def trained(kind: str, check: bool, **options: Any) -> tuple[list[str], Any]:
    """What the comparison says, and what training gives."""
    kind_of, labels = KINDS[kind]
    pl.seed_everything(3, verbose=False)
    module = kind_of().double()
    strategy = harness.strategy(num_micro_batches=2, self_check=check, stages=stages_of(module), **options)
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = harness.trainer(strategy, 2, max_epochs=2)
        trainer.fit(module, DataLoader(TensorDataset(data, labels_of(labels)), batch_size=8))
    told = [str(each.message) for each in caught if str(each.message).startswith("In mini-batch")]
    own = {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta}
    return told, (module.losses, own, module.kept(), torch.rand(()).item(), random.random(), np.random.rand())


def all_trained(rank: int, kinds: list[str]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        told, result = trained(kind, check=True)
        _, expected = trained(kind, check=False)
        found[kind] = told, repr(result) == repr(expected)
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kinds", [list(KINDS)[:8], list(KINDS)[8:]])
def test_what_begins_late_is_told_and_training_is_the_same(kinds: list[str]) -> None:
    first, second = harness.run(2, all_trained, kinds, timeout=190.0)
    for kind in kinds:
        (told, same), (told_elsewhere, _) = first[kind], second[kind]
        assert same, f"{kind}: the comparison changed training"
        assert told_elsewhere == []
        expected = [f"In mini-batch {WARNED[kind]}"] if kind in WARNED else []
        assert [text.split(",")[0] for text in told] == expected, kind


def logged(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = LogsSpread().double()
        data = TensorDataset(torch.randn(16, 4, dtype=torch.float64), torch.arange(16) % 3)
        trainer = harness.trainer(harness.strategy(num_micro_batches=2, stages=stages_of(module)), 2, max_epochs=1)
        trainer.fit(module, DataLoader(data, batch_size=8))
    return [str(each.message) for each in caught if "no mean over samples" in str(each.message)]


def test_logged_values_that_are_no_means_are_told() -> None:
    told, elsewhere = harness.run(2, logged)
    assert told
    assert all(text.startswith("spread, which the training step logs, is no mean over samples.") for text in told)
    assert elsewhere == []


def messages(rank: int) -> dict[str, list[str]]:
    return {kind: trained(kind, check=True)[0] for kind in ("ignored labels", "all ignored")}


def test_the_message_has_the_losses_and_the_remedy() -> None:
    found = harness.run(2, messages)[0]
    (text,) = found["ignored labels"]
    assert "the loss of 8 samples is" in text
    assert "as the mean over micro-batches of 4" in text
    assert "strategy.step=whole" in text
    assert "nan as the mean over" in found["all ignored"][0]
