"""What else trainers and modules are asked for: flags, callbacks, loggers, freezing, tied weights, changing shapes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Callback,
    LearningRateMonitor,
    ModelSummary,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_gpp._compat.lightning_module import set_device
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader, make_module
from tests.strategy.test_training import EXACT, plain


class Writer(BasePredictionWriter):
    """Keeps what it is told to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.batches.append((None if prediction is None else len(prediction), indices))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epochs.append(len(predictions))


class Freezing(TwoTowers):
    """Trains the head alone for an epoch, then everything."""

    def on_train_epoch_start(self) -> None:
        for part in (self.left, self.right):
            part.requires_grad_(self.current_epoch > 0)


class Growing(TwoTowers):
    """The left tower is released after an epoch, as a new group of the optimizer."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.left.requires_grad_(True)
            self.optimizers().optimizer.add_param_group({"params": list(self.left.parameters()), "lr": 0.01})

    def configure_optimizers(self) -> Any:
        self.left.requires_grad_(False)
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Ramp(TwoTowers):
    """A hook changes a value that a stage reads."""

    def __init__(self) -> None:
        super().__init__()
        self.left.append(Scale())

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.left[-1].factor *= 0.5


class Scale(nn.Module):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Tied(pl.LightningModule):
    """An embedding whose weight is also the head's, in different stages; sequences of changing length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("weights", torch.linspace(1, 2, 11))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.head(self.middle(self.embedding(batch)))[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        return (loss * self.weights[batch[:, 1:].flatten()]).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def sequences() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    lengths = (5, 5, 7, 5, 7)
    return DataLoader([torch.randint(0, 11, (6, n), generator=generator) for n in lengths], batch_size=None)


def fit_tied(strategy: Any, devices: int, folder: str) -> list[float]:
    torch.manual_seed(0)
    module = Tied().double()
    trainer = harness.trainer(strategy, devices, gradient_clip_val=0.2)
    trainer.fit(module, sequences())
    trainer.save_checkpoint(f"{folder}/tied{devices}.ckpt")
    return module.losses


def fit_kind(kind: type[TwoTowers], strategy: Any, devices: int, **options: Any) -> list[float]:
    torch.manual_seed(0)
    module = kind().double()
    harness.trainer(strategy, devices, **options).fit(module, loader())
    return module.losses


def kinds() -> dict[str, tuple[type[TwoTowers], dict[str, Any]]]:
    return {
        "a new group of the optimizer": (Growing, {"gradient_clip_val": 0.1}),
        "a value that a hook changes": (Ramp, {}),
    }


def fit_with_everything(strategy: Any, devices: int, folder: str) -> dict[str, Any]:
    module, writer = make_module(), Writer()
    module.example_input_array = (torch.zeros(2, 4).double(), torch.zeros(2, 3).double())
    watching: list[Callback] = [LearningRateMonitor(), Timer(), ModelSummary(), TQDMProgressBar()]
    logger = CSVLogger(folder, name="log", version=f"v{devices}")
    trainer = harness.trainer(
        strategy,
        devices,
        callbacks=[*watching, writer],
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=True,
        enable_model_summary=True,
    )
    trainer.fit(module, loader(), loader(10, seed=2))
    shown = dict(trainer.progress_bar_metrics)
    trainer.predict(module, loader(10, seed=2), return_predictions=False)
    return {"shown": shown, "batches": writer.batches, "epochs": writer.epochs, "log": logger.log_dir}


def run_all(rank: int, folder: str) -> dict[str, Any]:
    stages = {"embedding": 0, "middle": 0, "head": 1}
    tied = fit_tied(harness.strategy(stages=stages, num_micro_batches=3), 2, folder)
    runs = {name: fit_kind(kind, harness.strategy(), 2, **options) for name, (kind, options) in kinds().items()}
    return {"tied": tied, **runs, "everything": fit_with_everything(harness.strategy(), 2, folder)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("features")
    return folder, harness.run(2, run_all, str(folder))


@pytest.mark.parametrize("name", list(kinds()))
def test_losses(runs: Any, name: str) -> None:
    kind, options = kinds()[name]
    expected = plain(lambda: fit_kind(kind, "auto", 1, **options))
    for found in runs[1]:
        assert found[name] == pytest.approx(expected, **EXACT)


def test_tied_weights_and_changing_shapes(runs: Any) -> None:
    folder, found = runs
    expected = plain(fit_tied, "auto", 1, str(folder))
    assert found[0]["tied"] == found[1]["tied"] == pytest.approx(expected, **EXACT)
    ours, theirs = (torch.load(folder / f"tied{n}.ckpt", weights_only=False) for n in (2, 1))
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=1e-9, atol=1e-12)
    assert ours["optimizer_states"][0]["state"].keys() == theirs["optimizer_states"][0]["state"].keys()


def rows(folder: str) -> list[dict[str, str]]:
    with open(f"{folder}/metrics.csv") as file:
        return list(csv.DictReader(file))


def test_loggers_progress_bars_and_writers(runs: Any) -> None:
    folder, found = runs
    expected = plain(fit_with_everything, "auto", 1, str(folder))
    ours, theirs = found[0]["everything"], expected
    for report in found:
        assert report["everything"]["shown"] == pytest.approx(theirs["shown"], **EXACT)
    assert ours["batches"] == theirs["batches"]
    assert ours["epochs"] == theirs["epochs"]
    names = ("train_loss_step", "train_loss_epoch", "val_loss", "val_acc", "largest", "lr-AdamW/pg1", "step")
    for ours_row, theirs_row in zip(rows(ours["log"]), rows(theirs["log"]), strict=True):
        for name in names:
            numbers = [float(row[name] or "nan") for row in (ours_row, theirs_row)]
            assert numbers[0] == pytest.approx(numbers[1], nan_ok=True, **EXACT)


class OnItsDevice(TwoTowers):
    """Makes a tensor on its device in each step."""

    configured_on = ""

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, logits = super().loss(batch)
        return loss + torch.zeros((), device=self.device), logits

    def configure_optimizers(self) -> Any:
        self.configured_on = str(self.device)
        return super().configure_optimizers()


def on_device(rank: int, accelerator: str) -> tuple[str, str, int]:
    module = OnItsDevice().double()
    set_device(module, torch.device("meta"))
    stages = [{"modules": ["left"], "devices": [0]}, {"modules": ["right", "head", "@step"], "devices": [0]}]
    trainer = harness.trainer(harness.strategy(stages=stages), accelerator=accelerator, max_steps=2)
    trainer.fit(module, loader())
    return module.configured_on, str(module.device), len(module.losses)


ON_GPUS = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(("accelerator", "device"), [("cpu", "cpu"), pytest.param("gpu", "cuda:0", marks=ON_GPUS)])
def test_modules_know_their_device(accelerator: str, device: str) -> None:
    """A trainer moves the whole module to its device, which tells it. Here parts are moved, and it is told first."""
    assert harness.run(1, on_device, accelerator) == [(device, "cpu", 2)]
