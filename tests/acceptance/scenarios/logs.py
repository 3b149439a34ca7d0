"""Logging: what is logged from where, and what loggers, callbacks and users get of it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from tests.acceptance.scenarios.base import (
    Chain,
    Facts,
    Make,
    build,
    facts_of,
    family,
    loader,
    plain,
    scenario,
    validated,
)


def _logs(name: str, *calls: tuple[str, dict[str, Any]]) -> type[Chain]:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for given, options in calls:
            self.log(given, loss * 2 if given != "index" else float(batch_idx), **options)
        return loss

    return type(name, (Chain,), {"training_step": training_step})


def _logged(make: Make, folder: Path, calls: list[tuple[str, dict[str, Any]]]) -> Facts:
    module = build(_logs("Logs", *calls))
    trainer = make(with_logger=True, log_every_n_steps=1)
    trainer.fit(module, loader(), loader(10, seed=2))
    facts = facts_of(trainer, module)
    return {**facts, "zero rows": trainer.logger.rows, "bar": plain(trainer.progress_bar_metrics)}


family(
    "log",
    _logged,
    {
        "step": {"calls": [("a", {})]},
        "epoch": {"calls": [("a", {"on_step": False, "on_epoch": True})]},
        "both": {"calls": [("a", {"on_step": True, "on_epoch": True, "prog_bar": True})]},
        "minimum": {"calls": [("index", {"reduce_fx": "min", "on_epoch": True})]},
        "maximum": {"calls": [("index", {"reduce_fx": torch.max, "on_epoch": True})]},
        "sum": {"calls": [("index", {"reduce_fx": "sum", "on_epoch": True})]},
        "sum_of_loss": {"calls": [("a", {"reduce_fx": "sum", "on_epoch": True})]},
        "batch_size": {"calls": [("a", {"batch_size": 3, "on_epoch": True})]},
        "not_to_logger": {"calls": [("a", {"logger": False, "on_epoch": True})]},
        "synchronised": {"calls": [("a", {"sync_dist": True, "on_epoch": True})]},
        "rank_zero": {"calls": [("a", {"rank_zero_only": True, "on_epoch": True})]},
        "several": {"calls": [("a", {}), ("b", {"on_epoch": True}), ("index", {"on_epoch": True})]},
    },
)


@scenario
def log_of_own_size(make: Make, folder: Path) -> Facts:
    """Every mini-batch says its own number, such as its tokens, and the mean of the epoch is weighed by it."""

    class Weighs(Chain):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", self.loss(batch), batch_size=7 + 3 * batch_idx)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("weighed", loss, batch_size=5 * len(batch[0]), on_step=False, on_epoch=True)
            self.log("constant", loss, batch_size=1, on_step=False, on_epoch=True)
            return loss

    return validated(make, build(Weighs))


class Measures(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.train_error, self.error = MeanAbsoluteError(), MeanSquaredError()
        self.all = MetricCollection({"absolute": MeanAbsoluteError(), "squared": MeanSquaredError()}, prefix="all_")
        self.mean = MeanMetric()
        for metric in (self.train_error, self.error, self.all, self.mean):
            metric.set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        loss = torch.nn.functional.mse_loss(out, batch[1])
        self.train_error(out.detach(), batch[1])
        self.log("train_error", self.train_error, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        self.error(out, batch[1])
        self.log("val_error", self.error)
        self.all.update(out, batch[1])
        self.mean.update(out.mean())

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.all.compute())
        self.all.reset()
        self.log("mean", self.mean.compute())
        self.mean.reset()


@scenario
def metric_objects(make: Make, folder: Path) -> Facts:
    return validated(make, build(Measures))


@scenario
def metric_of_collection(make: Make, folder: Path) -> Facts:
    class Collects(Measures):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.all(self(batch[0]), batch[1])
            self.log_dict(self.all, on_step=False, on_epoch=True)

        def on_validation_epoch_end(self) -> None:
            pass

    return validated(make, build(Collects))


class TwoLoaders(Chain):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch))
        self.log(f"own_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)


@scenario
def several_validations(make: Make, folder: Path) -> Facts:
    module, trainer = build(TwoLoaders), make()
    trainer.fit(module, loader(), [loader(10, seed=2), loader(6, seed=3)])
    return facts_of(trainer, module)


@scenario
def tested_on_several(make: Make, folder: Path) -> Facts:
    class Two(Chain):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log("test_loss", self.loss(batch))

    return {"found": make().test(build(Two), [loader(10, seed=2), loader(6, seed=3)], verbose=False)}


@scenario
def csv_logger(make: Make, folder: Path) -> Facts:
    from lightning.pytorch.loggers import CSVLogger

    class Hyper(Chain):
        def __init__(self, lr: float = 0.1, width: int = 3) -> None:
            super().__init__(lr)
            self.save_hyperparameters()

    logger = CSVLogger(str(folder), name="log", version=0)
    validated(make, build(Hyper, lr=0.05), logger=logger, log_every_n_steps=1)
    file = folder / "log" / "version_0" / "metrics.csv"
    rows = list(csv.DictReader(file.open())) if file.exists() else []
    numbers = [{name: float(value) for name, value in row.items() if value} for row in rows]
    hyper = (folder / "log" / "version_0" / "hparams.yaml").read_text()
    return {"zero rows": numbers, "zero hyper": hyper}


@scenario
def tensorboard(make: Make, folder: Path) -> Facts:
    from lightning.pytorch.loggers import TensorBoardLogger

    class Draws(Chain):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            super().validation_step(batch, batch_idx)
            self.logger.experiment.add_scalar("own", float(batch_idx), self.global_step)

    logger = TensorBoardLogger(str(folder), name="log", version=0)
    facts = validated(make, build(Draws), logger=logger, log_every_n_steps=1)
    return {**facts, "zero files": len(list((folder / "log" / "version_0").glob("events*"))) == 1}


@scenario
def log_directly(make: Make, folder: Path) -> Facts:
    class Direct(Chain):
        def on_train_epoch_end(self) -> None:
            self.logger.log_metrics({"direct": float(self.current_epoch)}, step=self.global_step)

    trainer = make(with_logger=True)
    trainer.fit(build(Direct), loader())
    return {"zero rows": [row for row in trainer.logger.rows if "direct" in row]}


@scenario
def two_loggers(make: Make, folder: Path) -> Facts:
    from lightning.pytorch.loggers import CSVLogger

    loggers = [CSVLogger(str(folder), name=name, version=0) for name in ("one", "two")]
    facts = validated(make, logger=loggers, log_every_n_steps=1)
    files = [(folder / name / "version_0" / "metrics.csv").exists() for name in ("one", "two")]
    return {**facts, "zero files": files}


@scenario
def log_in_branches(make: Make, folder: Path) -> Facts:
    class Branches(Chain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if batch_idx % 2:
                self.log("odd", loss, on_epoch=True)
            return loss

    return validated(make, build(Branches))


@scenario
def log_not_finite(make: Make, folder: Path) -> Facts:
    class Infinite(Chain):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", self.loss(batch) / 0.0)

    return validated(make, build(Infinite))


@scenario
def print_in_steps(make: Make, folder: Path) -> Facts:
    class Prints(Chain):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.print("validates")
            super().validation_step(batch, batch_idx)

    return validated(make, build(Prints))


@scenario
def gathered(make: Make, folder: Path) -> Facts:
    class Gathers(Chain):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("gathered", self.all_gather(self.loss(batch)).mean())

    return validated(make, build(Gathers))
