"""Callbacks that read mini-batches and results of steps do what they do on one process, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torchmetrics import MeanMetric

from lightning_gpp import ConfigError
from lightning_gpp.strategy import batch_readers as readers
from tests.strategy.harness import TwoTowers, loader, run, strategy, trainer


class Model(TwoTowers):
    """Evaluation steps return what callbacks read; a hook of its own reads mini-batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(batch[1].square().sum()))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        return {"loss": loss, "logits": logits}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Nothing is kept."""


class Confusion(Callback):
    """Counts predictions and labels from results and mini-batches, and logs what it counts."""

    def __init__(self) -> None:
        self.counts = torch.zeros(3, 3)
        self.sums: list[float] = []

    def count(self, outputs: Any, batch: Any) -> None:
        for place in zip(outputs["logits"].argmax(1).tolist(), batch[2].tolist(), strict=True):
            self.counts[place] += 1

    def on_train_batch_start(self, machine: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.sums.append(float(batch[0].sum()))

    def on_train_batch_end(self, machine: Any, module: Any, outputs: Any, batch: Any, *rest: Any) -> None:
        self.count(outputs, batch)

    def on_validation_batch_end(self, *arguments: Any) -> None:
        self.count(*arguments[2:4])

    def on_validation_epoch_end(self, machine: Any, module: Any) -> None:
        module.log("counted", self.counts.trace())

    def on_test_batch_end(  # type: ignore[override]
        self, machine: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module.log("spread", outputs["logits"].std() * len(batch[0]))


class Lines(Callback):
    """Writes predictions, as a callback that knows nothing of ranks."""

    def __init__(self, file: str) -> None:
        self.file, self.kept = file, list[Any]()

    def on_predict_batch_end(  # type: ignore[override]
        self, machine: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.kept.append(outputs)
        with open(self.file, "a") as file:
            file.write(f"{batch_idx} {outputs.sum().item():.9f}\n")

    def on_predict_epoch_end(self, machine: Any, module: Any) -> None:
        with open(self.file, "a") as file:
            file.write(f"all {torch.cat(self.kept).sum().item():.9f}\n")


def facts_of(given: Any, devices: int, file: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module, confusion, losses = Model().double(), Confusion(), list[float]()
    noted = LambdaCallback(on_train_batch_end=lambda machine, module, out, *_: losses.append(float(out["loss"])))
    machine = trainer(given, devices, callbacks=[confusion, noted, Lines(file)])
    machine.fit(module, loader(), loader(10, seed=2))
    metrics = {name: float(value) for name, value in machine.callback_metrics.items()}
    (tested,) = machine.test(module, loader(10, seed=3), verbose=False)
    machine.predict(module, loader(10, seed=4), return_predictions=False)
    return {
        "counts": confusion.counts.flatten().tolist(),
        "sums": confusion.sums,
        "metrics": metrics,
        "tested": tested,
        "losses": [*losses, *module.losses],
    }


def on_ranks(rank: int, file: str, options: dict[str, Any]) -> dict[str, Any]:
    return facts_of(strategy(**options), 2, file)


@pytest.mark.parametrize("options", [{}, {"step": "whole"}], ids=["micro_batches", "whole"])
def test_as_on_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = facts_of("auto", 1, str(tmp_path / "one"))
    for found in run(2, on_ranks, str(tmp_path / "two"), options):
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-11), name
    assert (tmp_path / "two").read_text() == (tmp_path / "one").read_text()


class Reads(Callback):
    """Uses what is too large to be on every rank."""

    def on_train_batch_end(self, machine: Any, module: Any, outputs: Any, batch: Any, *rest: Any) -> None:
        if not machine.is_global_zero:
            with pytest.raises(ConfigError, match=r"A tensor was used here \(\.sum\).* are too much .*is_global_zero"):
                batch[0].sum()
            assert outputs["loss"].item() > 0
            with pytest.raises(ConfigError, match=r"A tensor was used here \(\.argmax\)"):
                outputs["logits"].argmax(1)


class Returns(TwoTowers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        return {"loss": loss, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Without that of its base, which uses them, too."""


def large(rank: int) -> None:
    readers.MOST_BYTES = 100  # type: ignore[misc]
    trainer(strategy(), 2, callbacks=[Reads()], limit_val_batches=0).fit(Returns().double(), loader())


def test_what_is_large_stays_where_it_is() -> None:
    run(2, large)


class Computes(TwoTowers):
    """Computes a metric in a hook, of which only the step's rank has the state."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss(batch)
        self.mean.update(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean.compute()


def computing(rank: int) -> None:
    trainer(strategy(), 2, limit_val_batches=0).fit(Computes().double(), loader())


def test_stale_metrics_are_told() -> None:
    with pytest.raises(AssertionError, match="The value of the metric mean is asked for between"):
        run(2, computing)
