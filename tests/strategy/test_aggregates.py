"""Aggregators of torchmetrics get from a training step what one process gives them, with several micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, MinMetric, RunningMean, SumMetric
from torchmetrics.aggregation import BaseAggregator

from tests.strategy import harness
from tests.strategy.harness import TwoTowers
from tests.strategy.test_asynchronous import STAGES, Towers, samples


class Aggregating(TwoTowers):
    """Gives its loss, counts and values of samples to aggregators, and logs them in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.total, self.largest = MeanMetric(), SumMetric(), MaxMetric()
        self.hits, self.weighted, self.recent = SumMetric(), MeanMetric(), RunningMean(2)
        self.all, self.of_samples, self.two = CatMetric(), MeanMetric(), MeanMetric()
        self.several = MetricCollection({"least": MinMetric(), "average": MeanMetric()})
        self.since, self.plain = MeanMetric(), SumMetric()
        self.summed, self.highest = SumMetric(), MaxMetric()
        self.after, self.kept = list[float](), list[list[float]]()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, logits = self.loss(batch)
        hits = (logits.argmax(1) == batch[2]).sum()
        self.update(loss, logits, hits)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log_dict({"total": self.total, "largest": self.largest, "hits": self.hits}, on_step=True, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        self.log("recent", self.recent, on_step=False, on_epoch=True)
        self.log("running", self.running(loss, batch_idx), on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def update(self, loss: Tensor, logits: Tensor, hits: Tensor) -> None:
        size = len(logits)
        self.log("present", self.mean(loss))
        self.total(loss)
        self.largest(loss)
        self.hits(hits)
        self.weighted.update(loss.item(), weight=size)
        self.recent(loss)
        self.all.update(loss)
        self.of_samples.update(logits.detach().amax(1))
        self.two.update(loss)
        self.two.update(3 * loss)
        self.several(loss)
        self.plain.update(size)
        self.summed.update(loss.item() * size)
        self.highest.update(logits.detach().max())

    def running(self, loss: Tensor, batch_idx: int) -> Tensor:
        """The mean of the last two losses, after which the step begins anew."""
        self.since.update(loss)
        mean: Tensor = self.since.compute()
        if batch_idx % 2:
            self.since.reset()
        return mean

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.trainer.is_global_zero:
            self.after.append(float(self.mean.mean_value))

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        metrics = (self.weighted, self.of_samples, self.two, self.plain, self.since, self.summed, self.highest)
        self.kept.append([*(float(metric.compute()) for metric in metrics), *self.all.compute().tolist()])
        self.kept[-1] += [part.update_count for part in self.children() if isinstance(part, BaseAggregator)]


def aggregated(rank: int, devices: int) -> list[Any]:
    torch.set_default_dtype(torch.float64)  # of the metrics, and of Lightning's means
    torch.manual_seed(0)
    module = Aggregating()
    strategy = harness.strategy(num_micro_batches=2) if devices > 1 else "auto"
    harness.trainer(strategy, devices).fit(module, harness.loader(21))
    return [module.metrics, module.kept, module.after]


def test_all_ranks_have_the_values_of_one_process() -> None:
    """The last of three mini-batches has five samples, in micro-batches of three and two."""
    ((logged, kept, after),) = harness.run(1, aggregated, 1)
    assert {"mean_step", "mean_epoch", "hits_step", "recent", "least", "running"} <= logged[0].keys()
    first, other = harness.run(2, aggregated, 2)
    for found in (first, other):
        assert found[0] == [pytest.approx(values, rel=1e-12) for values in logged]
        assert found[1] == [pytest.approx(values, rel=1e-12) for values in kept]
    assert first[2] == pytest.approx(after, rel=1e-12)


class Ahead(Towers):
    """Has two losses of each mini-batch: what an aggregator got until it was logged, and the log."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.found = CatMetric(), list[tuple[list[float], float]]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.all(loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (0, 4) else None

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.trainer.is_global_zero:
            logged = float(self.trainer.callback_metrics["train_loss_step"])
            self.found.append((self.all.compute().reshape(-1).tolist(), logged))


def ran_ahead(rank: int) -> list[tuple[list[float], float]]:
    torch.set_default_dtype(torch.float64)
    module = Ahead()
    strategy = harness.strategy(stages=STAGES, num_micro_batches=2, weights="stash")
    harness.trainer(strategy, 3).fit(module, DataLoader(samples(), batch_size=8))
    return module.found


def test_mini_batches_that_run_before_their_turn_count_in_turn() -> None:
    """The first epoch ends in the midst of its data: mini-batches that have run count never."""
    found, *_ = harness.run(3, ran_ahead)
    losses = [loss for _, loss in found]
    assert len(found) == 4 + 7
    for number, (values, _) in enumerate(found):
        assert values == pytest.approx(losses[: number + 1], rel=1e-12)
