"""torchmetrics objects wherever users keep and compute them: on all ranks the values of one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection, MetricTracker, SumMetric
from torchmetrics.classification import MulticlassAUROC

from lightning_gpp import summon_full_params
from lightning_gpp.capture.metrics import keep_apart
from tests.strategy import harness
from tests.strategy.harness import TwoTowers


class Measured(TwoTowers):
    """Keeps metrics in a tracker, which copies them, in plain containers, and makes one in a hook."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.tracker = MetricTracker(MeanMetric(), maximize=False)
        self.kept = {"areas": [MulticlassAUROC(3)]}
        self.bundle = (MetricCollection({"mean": MeanMetric(), "sum": SumMetric()}),)
        self.running = MeanMetric()
        self.found: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, logits = self.loss(batch)
        self.running.update(loss.detach())
        self.running.compute()  # synchronises, while other ranks do not call it
        return {"loss": loss, "logits": logits.detach()}

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()
        self.made = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits = self.loss(batch)
        self.tracker.update(loss)
        self.made.update(loss)
        self.bundle[0].update(loss)
        self.kept["areas"][0].update(logits.softmax(1), batch[-1])
        return loss

    def on_validation_epoch_end(self) -> None:
        values = {
            "area": self.kept["areas"][0].compute(),
            "tracked": self.tracker.compute(),
            "made": self.made.compute(),
        }
        copied, stored = copy.deepcopy(self.made), pickle.loads(pickle.dumps(self.made))
        values |= self.bundle[0].compute() | {"copied": copied.compute()}
        self.found.append({name: float(value) for name, value in values.items()})
        assert stored.dist_sync_fn is None
        self.kept["areas"][0].reset()
        self.bundle[0].reset()


class Watch(Callback):
    """Keeps a metric, which only the ranks that run the step update."""

    def __init__(self) -> None:
        self.mean, self.found = MeanMetric(), list[float]()

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if outputs is not None:
            self.mean.update(outputs)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.found.append(float(self.mean.compute()))


def run(strategy: Any, devices: int, lr: float) -> list[dict[str, float]]:
    torch.manual_seed(0)
    module, watch = Measured(lr=lr).double(), Watch()
    trainer = harness.trainer(strategy, devices, num_sanity_val_steps=0, callbacks=[watch])
    trainer.fit(module, harness.loader(32), harness.loader(32, seed=2))
    if trainer.global_rank == 0:  # nobody waits for the others after the run
        best, epoch = module.tracker.best_metric(return_step=True)
        module.found[-1] |= {"best": best, "epoch": epoch, "total": float(watch.mean.compute())}
    return [values | {"watched": watched} for values, watched in zip(module.found, watch.found, strict=True)]


def divided(rank: int, lr: float, settings: dict[str, Any]) -> list[dict[str, float]]:
    return run(harness.strategy(num_micro_batches=2, **settings), 2, lr)


ALL = [{"modules": ["left", "right", "head", "@step"], "devices": [0]}]


@pytest.mark.parametrize(
    ("lr", "settings"), [(0.05, {}), (0.0, {"stages": ALL, "num_pipelines": 2})], ids=["stages", "pipelines"]
)
def test_values_of_one_process(lr: float, settings: dict[str, Any]) -> None:
    """Pipelines train with larger mini-batches; without a learning rate all the same."""
    expected = run("auto", 1, lr)
    for rank, found in enumerate(harness.run(2, divided, lr, settings)):
        for values, wanted in zip(found, expected, strict=True):
            kept = wanted if rank == 0 else {name: wanted[name] for name in values}
            assert values == pytest.approx(kept, rel=1e-12)


def test_a_copy_leaves_metrics_that_it_shares() -> None:
    module, other = Measured(), Measured()
    other.running = module.running
    keep_apart(other, module)
    assert other.kept["areas"][0].distributed_available_fn is bool
    assert module.running.distributed_available_fn is not bool


class Norms(Callback):
    """Logs norms of parameters of all ranks, and keeps what was logged."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        with summon_full_params(module):
            module.log("norm", module.left[0].weight.norm())
            module.log_dict({name: value.abs().sum() for name, value in module.named_parameters()}, prog_bar=True)


def logged(strategy: Any, devices: int) -> dict[str, float]:
    torch.manual_seed(0)
    trainer = harness.trainer(strategy, devices, callbacks=[Norms()])
    trainer.fit(TwoTowers().double(), harness.loader(32), harness.loader(32, seed=2))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def logged_in_stages(rank: int) -> dict[str, float]:
    return logged(harness.strategy(num_micro_batches=1), 2)


def test_callbacks_log_weights() -> None:
    expected = logged("auto", 1)
    assert harness.run(2, logged_in_stages) == [pytest.approx(expected, rel=1e-11)] * 2
