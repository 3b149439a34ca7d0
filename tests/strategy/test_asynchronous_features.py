"""Lightning around asynchronous training: what is logged, when it is logged, and what ends an epoch before its data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpp import GPPStrategy
from tests.strategy import harness
from tests.strategy.test_asynchronous import CHAIN, STAGES, Towers, samples

BATCHES = 7
"""Mini-batches of an epoch, the last one smaller."""


class Memory(Logger):
    """Keeps what is logged, by step."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.entries.append((int(step or 0), dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def of(self, name: str) -> dict[int, float]:
        return {step: metrics[name] for step, metrics in self.entries if name in metrics}


class Featured(Towers):
    """Metrics, hooks and a learning rate; without dropout, so that a loss depends on weights and samples alone."""

    def __init__(self, *, rate: float = 0.1, stop_at: int | None = None, in_line: bool = False) -> None:
        super().__init__(in_line=in_line)
        self.left[3].p = 0.0
        self.rate, self.stop_at = rate, stop_at
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.hooks: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b, y = batch
        logits = self(a, b)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("index", float(batch_idx), on_step=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.hooks.append(f"start {batch_idx}")
        return -1 if self.stop_at == batch_idx and self.current_epoch == 0 else None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooks.append(f"step {self.global_step}")

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(settings: dict[str, Any], model: dict[str, Any], trainer: dict[str, Any], *, data: str = "") -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    own = {"stages": STAGES, "num_micro_batches": 2, "weights": "stash", **settings}
    strategy = GPPStrategy(**{"failure_timeout": 60.0, "timeout": 60.0, "seed": 5, **own})
    module, logger = Featured(**model), Memory()
    if trainer.get("precision") == "bf16-mixed":
        module.float()
    callbacks = [callback() for callback in trainer.pop("callbacks", ())]
    run = harness.trainer(
        strategy,
        devices=3,
        **{"logger": logger, "max_epochs": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1, **trainer},
        callbacks=callbacks,
    )
    known = samples()
    if data == "float":
        known = TensorDataset(*(column.float() if column.is_floating_point() else column for column in known.tensors))
    run.fit(module, DataLoader(known, batch_size=8), DataLoader(known, batch_size=8))
    after = run.validate(module, DataLoader(known, batch_size=8), verbose=False)
    return {
        "losses": module.losses,
        "logged": logger.entries,
        "train_loss": logger.of("train_loss_step"),
        "index": logger.of("index"),
        "hooks": module.hooks,
        "val": module.validated,
        "steps": run.global_step,
        "after": after,
    }


def fit_all(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [fit(**case) for case in cases]


@torch.no_grad()
def plain_losses() -> list[float]:
    """The losses of the mini-batches under the first weights."""
    module = Featured().eval()
    found = []
    for a, b, y in DataLoader(samples(), batch_size=8):
        halves = [slice(0, len(y) // 2), slice(len(y) // 2, None)]
        losses = [nn.functional.cross_entropy(module(a[part], b[part]), y[part]) for part in halves]
        found.append(float(torch.stack(losses).mean()))
    return found


STANDING: dict[str, Any] = {"settings": {}, "model": {"rate": 0.0}, "trainer": {"max_epochs": 2}}
"""Weights that stay: every loss is that of its mini-batch, whichever version it was computed with."""


@pytest.mark.acceptance
def test_an_epoch_that_is_left_early() -> None:
    """Mini-batches on their way are given up, and nothing of them is left: neither in the next epoch nor in the next
    run."""
    skipped = {**STANDING, "model": {"rate": 0.0, "stop_at": 3}}
    patience = partial(EarlyStopping, "val_loss", patience=1, min_delta=100.0)
    stopped = {**STANDING, "trainer": {"val_check_interval": 2, "callbacks": [patience]}}
    first, *_ = harness.run(3, fit_all, [skipped, stopped, STANDING])
    losses = plain_losses()
    assert first[0]["losses"] == pytest.approx(losses[:3] + losses, rel=1e-12)
    assert first[1]["losses"] == pytest.approx(losses[:4], rel=1e-12)
    assert first[1]["steps"] == 4
    assert first[2]["losses"] == pytest.approx(losses * 2, rel=1e-12)
    assert list(first[2]["train_loss"]) == list(range(2 * BATCHES)), "a loss is logged at the step of its mini-batch"
    assert list(first[2]["train_loss"].values()) == pytest.approx(losses * 2, rel=1e-12)
    assert list(first[2]["index"].values()) == [*range(BATCHES)] * 2
    assert first[0]["after"] == first[1]["after"] == first[2]["after"]


CASES: list[dict[str, Any]] = [
    {
        "settings": {},
        "model": {},
        "trainer": {
            "val_check_interval": 3,
            "accumulate_grad_batches": 2,
            "callbacks": [partial(LearningRateMonitor, "step")],
            "gradient_clip_val": 0.5,
        },
    },
    {
        "settings": {"stages": CHAIN, "num_micro_batches": 1, "weights": "predicted"},
        "model": {"in_line": True},
        "trainer": {"precision": "bf16-mixed", "val_check_interval": 2},
        "data": "float",
    },
]


def test_hooks_and_logs_of_everything_at_once() -> None:
    ranks = harness.run(3, fit_all, CASES)
    assert [entry["hooks"] for entry in ranks[1]] == [entry["hooks"] for entry in ranks[0]]
    accumulated, mixed = ranks[0]
    assert [hook for hook in accumulated["hooks"] if "step" in hook] == [f"step {number}" for number in range(4)]
    assert [hook for hook in mixed["hooks"] if "step" in hook] == [f"step {number}" for number in range(BATCHES)]
    rates = [entry["lr-SGD"] for _, entry in accumulated["logged"] if "lr-SGD" in entry]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


class Endless(IterableDataset[Any]):
    """Samples without an end, one after the other; notes how many were read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        for sample in cycle(samples()):
            self.read += 1
            yield sample


def streamed(rank: int) -> list[tuple[list[float], int]]:
    found = []
    for policy in ("stash", "newest_graph"):
        module, data = Towers(in_line=True, dropout=0.0), Endless()
        strategy = GPPStrategy(stages=CHAIN, weights=policy, num_micro_batches=1, failure_timeout=60.0, timeout=60.0)
        run = harness.trainer(strategy, devices=3, max_steps=BATCHES)
        run.fit(module, DataLoader(data, batch_size=1))
        found.append((module.losses, data.read))
    return found


def test_a_stream_without_an_end() -> None:
    """What a step returns is on all ranks in order; no sample is read that no step trains on, but for set-up's one."""
    ranks = harness.run(3, streamed)
    (exact, read), (near, _) = ranks[0]
    assert read == BATCHES + 1
    assert [[losses for losses, _ in found] for found in ranks] == [[exact, near]] * 3
    assert len(exact) == len(near) == BATCHES
    assert near != exact
    assert near[:2] == exact[:2], "no gradient of another sample has come yet"
