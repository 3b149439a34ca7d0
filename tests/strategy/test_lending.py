"""Hooks outside of mini-batches, and evaluation steps that cannot be divided, have the values of other ranks."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from lightning_gpp.errors import ForeignTensorError
from tests.strategy import harness

STAGES = [{"modules": ["body"], "devices": [1]}, {"modules": ["head", "@step"], "devices": [0]}]
ONE = torch.ones(2, 4, dtype=torch.float64)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("levels", torch.linspace(0.1, 1.0, 4))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Samples(Plain):
    """Calls the network in a hook, with a buffer that no other rank has."""

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        x = ONE * self.levels
        for level in self.levels:
            x = x - level * self(x)
        self.seen.append(float(x.sum()))
        self.log("sample", x.sum())


class Merges(Plain):
    """Changes weights by those of another rank, which changes them right after that, and by a number read of them."""

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        self.body.weight += 0.1 * self.head.weight.T
        size = self.head.weight.norm().item()
        self.head.weight.mul_(0.5)
        self.head.bias.data = self.head.bias.data + self.body.weight.mean()
        self.body.weight.div_(1.0 + size)
        self.seen.append(float(self.body.weight.sum()))


class Swaps(Plain):
    """Needs values of another rank from before their change."""

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        before = self.body.weight.clone()
        self.body.weight.copy_(self.head.weight.T)
        try:
            self.head.weight.copy_(before.T)
            self.seen.append("done")  # type: ignore[arg-type]
        except ForeignTensorError as error:
            self.seen.append(str(error))  # type: ignore[arg-type]


class SamplesOnRankZero(Plain):
    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.seen.append(float(self(ONE).sum()) + float(self.body(ONE).sum()))


class Fails(Plain):
    """Catches an error behind the call of a network on one rank."""

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        try:
            if self.trainer.is_global_zero:
                raise KeyError(float(self(ONE).sum()))
        except KeyError as error:
            self.seen.append(error.args[0])


class ReadsWeights(Plain):
    """Reads, logs, copies and saves weights of all ranks; one rank does more than the others."""

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        self.log("norm", torch.cat([weight.flatten() for weight in self.parameters()]).norm())
        self.log("first", self.body.weight.detach().sum())
        if self.trainer.is_global_zero:
            self.seen += [float(weight.data.cpu().numpy().std()) for weight in self.parameters()]
            self.seen.append(float(copy.deepcopy(self.body)(ONE).sum()))
            file = io.BytesIO()
            torch.save({name: weight.cpu().clone() for name, weight in self.state_dict().items()}, file)
            file.seek(0)
            self.seen += [float(weight.sum()) for weight in torch.load(file).values()]


class Averages(Plain):
    """Averages weights by torch, whose counter belongs to no stage; counts epochs, and decides by both."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.body)
        self.register_buffer("epochs", torch.zeros(1))

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.body)

    def on_train_epoch_end(self) -> None:
        if self.epochs > 0:
            self.average.update_parameters(self.body)
        self.epochs += 1
        self.seen += [float(weight.detach().sum()) for weight in self.average.parameters()]


class Saves(Plain):
    """Saves a checkpoint in a hook, which calls another hook; each calls the network."""

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        self.body(ONE)
        with tempfile.TemporaryDirectory() as folder:
            self.trainer.save_checkpoint(f"{folder}/saved.ckpt")
        self.seen += [float(self(ONE).sum()), float(self.body.weight.sum())]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen += [float(self(ONE).sum()), float(self.head.weight.norm())]


class Logs(pl.Callback):
    @rank_zero_only
    @torch.no_grad()
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.seen.append(float(pl_module(ONE).sum()))


class Decodes(Plain):
    """Calls the network until its results say that it is enough."""

    def decoded(self, x: Tensor) -> Tensor:
        calls = 0
        while calls < 3 or (calls < 6 and x.sum() > -1e3):
            x, calls = self(x), calls + 1
        return x * calls

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("decoded", self.decoded(batch[0]).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.decoded(batch[0])


class Reads(Decodes):
    """Reads values between its calls, in a way that only a run on values can go."""

    def decoded(self, x: Tensor) -> Tensor:
        while len(x.nonzero()) and x.abs().mean().item() > 0.3:
            x = 0.5 * self(x)[: len(x)]
        return x


def loader() -> DataLoader[Any]:
    return DataLoader(harness.make_data(8), batch_size=4)


def trainer(gpp: bool, **options: Any) -> pl.Trainer:
    given = harness.strategy(stages=STAGES, num_micro_batches=2) if gpp else "auto"
    return harness.trainer(given, 2 if gpp else 1, **options)


def fit(rank: int, gpp: bool, kind: type[Plain], callbacks: list[pl.Callback]) -> Any:
    module, made = kind().double(), trainer(gpp, callbacks=callbacks)
    made.fit(module, loader(), *([loader()] if issubclass(kind, Decodes) else []))
    return module.seen, {name: float(value) for name, value in made.callback_metrics.items()}


def predict(rank: int, gpp: bool, kind: type[Plain]) -> Any:
    module, made = kind().double(), trainer(gpp)
    made.fit(module, loader(), loader())
    predicted = made.predict(module, loader())
    return predicted, trainer(gpp).validate(kind().double(), loader(), verbose=False)


def both(function: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
    first, _ = harness.run(2, function, True, *given)
    return first, function(0, False, *given)


@pytest.mark.parametrize(
    "kind",
    [
        Samples,
        SamplesOnRankZero,
        ReadsWeights,
        Saves,
        Averages,
        Merges,
        pytest.param(Fails, marks=pytest.mark.acceptance),
    ],
)
def test_hooks_at_the_ends_of_epochs_call_the_network(kind: type[Plain]) -> None:
    (seen, metrics), (expected, logged) = both(fit, kind, [])
    assert len(expected) in (2, 2 * 2, 2 * 4, 2 * (4 + 1 + 5))
    assert seen == pytest.approx(expected, rel=1e-12)
    assert metrics == pytest.approx(logged, rel=1e-12)


def test_values_from_before_a_change_are_refused() -> None:
    (_, first), (_, other) = [seen for seen, _ in harness.run(2, fit, True, Swaps, [])]
    assert other == "done"
    assert "not copies that earlier hooks made, or changed ones" in first


def test_so_do_hooks_of_callbacks_on_one_rank() -> None:
    (seen, _), (expected, _) = both(fit, Plain, [Logs()])
    assert len(expected) == 2
    assert seen == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", [Decodes, pytest.param(Reads, marks=pytest.mark.acceptance)])
def test_evaluation_calls_the_network_as_often_as_the_data_ask_for(kind: type[Plain]) -> None:
    (_, metrics), (_, logged) = both(fit, kind, [])
    assert metrics == pytest.approx(logged, rel=1e-12)
    (predicted, validated), (expected, alone) = both(predict, kind)
    torch.testing.assert_close(predicted, expected, rtol=1e-12, atol=1e-12)
    assert validated[0] == pytest.approx(alone[0], rel=1e-12)
