"""What steps and hooks of many users do beside computing a loss, on two ranks as in one process."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_gpp import summon_full_params
from lightning_gpp.errors import CaptureError
from tests.strategy import harness


class Plain(pl.LightningModule):
    """Two layers of their own; hooks note what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)
        self.noted = list[Any]()

    def logits(self, batch: Any) -> Tensor:
        logits: Tensor = self.head(self.backbone(batch[0]))
        return logits

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.logits(batch), batch[2])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        self.backbone[2].p = 0.0

    def on_train_epoch_end(self) -> None:
        with summon_full_params(self):
            self.noted.extend(float(parameter.norm()) for parameter in self.parameters())


class ReadsOutputs(Plain):
    """The module's own hook decides by more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.logits(batch)
        return {"loss": nn.functional.cross_entropy(logits, batch[2]), "hits": (logits.argmax(1) == batch[2]).sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append(int(outputs["hits"]))
        if outputs["hits"] > 1:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.98)


class Freezes(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.backbone[0].requires_grad_(self.global_step >= 3)
        return self.loss(batch)


class Evaluates(Plain):
    """Dropout is off in the step alone."""

    def on_fit_start(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.backbone.eval()
        return self.loss(batch)


class SetsRate(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.2 / (1 + self.global_step)
        return self.loss(batch)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.noted.append(self.trainer.optimizers[0].param_groups[0]["lr"])


class ChangesBatch(Plain):
    """Normalises in place, in training and validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].div_(2).add_(0.1)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch[0].div_(2)
        self.log("val", self.loss(batch) + batch[0].sum())


class LogsCounts(Plain):
    """Logs means over some of the samples, in some micro-batches of as many as in others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = nn.functional.cross_entropy(self.logits(batch), batch[2], reduction="none")
        chosen = batch[2] != 0
        number = int(chosen.sum())
        self.log("chosen", (losses * chosen).sum() / max(1, number), batch_size=number, on_step=False, on_epoch=True)
        return losses.mean()


class LogsSometimes(LogsCounts):
    """Also logs means without the number of their samples, if there are any."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if (batch[2] == 0).any():
            self.log("zeros", batch[0][batch[2] == 0].mean())
        return loss


class Logger(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows = list[int]()

    def log_metrics(self, metrics: Any = None, step: Any = None, **kwargs: Any) -> None:
        if "raw" in metrics:
            self.rows.append(step)


class LogsByHand(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.log_metrics({"raw": 1.0}, step=self.global_step)  # type: ignore[union-attr]
        return self.loss(batch)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:  # the step runs there alone
            assert sorted(set(self.logger.rows)) == [*range(12)]  # type: ignore[union-attr]
            assert self.logger.rows.count(0) <= 4  # type: ignore[union-attr]  # as later ones: set-up logs nothing


HABITS = (ReadsOutputs, Freezes, Evaluates, SetsRate, ChangesBatch, LogsCounts, LogsByHand)


def trained(kind: type[Plain], devices: int, **options: Any) -> tuple[dict[str, float], list[Any], list[str]]:
    """What was logged, what hooks noted, with the norms of the weights, and the warnings."""
    torch.manual_seed(0)
    module = kind().double()
    strategy = harness.strategy(stages=STAGES, num_micro_batches=2, **options) if devices == 2 else "auto"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = harness.trainer(strategy, devices, logger=Logger(), log_every_n_steps=1, num_sanity_val_steps=0)
        trainer.fit(module, harness.loader(22, 4), harness.loader(6, 3))
    facts = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return facts, module.noted, [str(each.message) for each in caught]


STAGES = [{"modules": ["backbone"], "devices": [1]}, {"modules": ["head", "@step"], "devices": [0]}]


def all_habits(rank: int, devices: int) -> dict[str, Any]:
    return {kind.__name__: trained(kind, devices) for kind in HABITS}


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (alone,) = harness.run(1, all_habits, 1)
    return alone, harness.run(2, all_habits, 2)


@pytest.mark.parametrize("habit", [kind.__name__ for kind in HABITS])
def test_two_ranks_do_what_one_process_does(habit: str, found: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    (facts, noted, _), ranks = found[0][habit], found[1]
    for rank in ranks:
        assert rank[habit][0] == pytest.approx(facts, rel=1e-12)
        assert rank[habit][1] == pytest.approx(noted)


@pytest.mark.parametrize(("habit", "flag"), [("Freezes", "requires_grad"), ("Evaluates", "training")])
def test_steps_that_set_switches_run_as_a_whole(
    habit: str, flag: str, found: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    told = " ".join(found[1][0][habit][2])
    assert "runs as a whole" in told
    assert f"it changes {flag} of 'backbone" in told


def told_of_logs(rank: int) -> list[str]:
    return [text for text in trained(LogsSometimes, 2)[2] if "some micro-batches" in text]


def test_means_that_are_logged_for_some_micro_batches_are_told() -> None:
    (told,), others = harness.run(2, told_of_logs)
    assert "logged 'zeros' for some micro-batches of a mini-batch only" in told
    assert not others


def refused(rank: int) -> list[str]:
    texts = list[str]()
    for kind in (Freezes, Evaluates):
        with pytest.raises(CaptureError) as raised:
            trained(kind, 2, step="micro_batches")
        texts.append(str(raised.value))
    return texts


def test_micro_batches_of_steps_that_set_switches_are_refused() -> None:
    for freezing, evaluating in harness.run(2, refused):
        assert "changes requires_grad of 'backbone.0.weight' and 1 more" in freezing
        assert "changes training of 'backbone'" in evaluating
        assert "strategy.step=whole" in freezing
