"""What steps, forwards and hooks keep in attributes of the module, and read on all ranks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric

from tests.acceptance.scenarios.base import Chain, Facts, Make, build, facts_of, family, loader, staged, validated


class Decides(Chain):
    """Drops gradients of losses that grow, and learns at a rate that follows from the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.newest, self.chosen, self.before = torch.zeros(()), {"rate": 1.0}, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.newest = loss.detach()
        self.chosen["rate"] = 1 / (1 + float(loss))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(self.newest) > self.before)
        self.before = float(self.newest)
        if self.seen[-1]:
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: self.chosen["rate"])
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@dataclass
class Found:
    batch: int
    share: float


class Collects(Chain):
    """Decides at the ends of epochs by lists that its steps have filled."""

    def __init__(self) -> None:
        super().__init__()
        self.hits: list[Tensor] = []
        self.trained: dict[str, list[Tensor]] = {"losses": []}
        self.found: list[Found] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained["losses"].append(self(batch[0]).square().sum().detach())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.hits.append(self(batch[0]).argmax(1) == batch[1].argmax(1))
        self.found.append(Found(batch_idx, float(self.hits[-1].double().sum())))

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        share = sum(int(each.sum()) for each in self.hits) / max(1, sum(map(len, self.hits)))
        self.seen += [share, sum(each.share for each in self.found)]
        self.hits.clear()
        self.found.clear()
        for parameter in self.parameters():
            parameter.mul_(1.0 - 0.5 * share)

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(sum(self.trained["losses"])))
        self.trained["losses"].clear()


class Long(Chain):
    """Decides around mini-batches by a list of more numbers than travel with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [0.5] * 63

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.kept.append(loss.item())
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(sum(self.kept))
        if len(self.kept) > 66:
            self.kept.clear()


class Counting(nn.Module):
    """Keeps the number of its calls in training, and a mean."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = nn.Identity() if layer is None else layer
        self.calls, self.kept, self.mean = 0, {"calls": 0}, None

    def forward(self, values: Tensor) -> Tensor:
        self.calls += self.training
        self.kept["calls"] += 1
        out: Tensor = self.layer(values)
        self.mean = out.detach().mean()
        return out


class Noting(nn.Module):
    """A loss that keeps numbers, lists and tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.history, self.recent = 0, list[float](), deque[float](maxlen=2)
        self.running = torch.zeros(())

    def forward(self, found: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(found, target)
        self.number += 1
        self.history += [loss.item()] * 30
        self.recent.append(loss.item())
        self.running = 0.9 * self.running + 0.1 * loss.detach()
        return loss


class InParts(Chain):
    """Steps and forwards keep values in parts of the module, on either rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.before, self.loss_of = Counting(self.first), Counting(), Noting()
        self.loss_of.flag = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss_of.flag = f"{self.loss_of.flag}{batch_idx}"
        return self.loss_of(self(self.before(batch[0])), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / self.loss_of.number

    def on_validation_epoch_start(self) -> None:
        self.first.calls = 0

    def on_train_epoch_end(self) -> None:
        kept = self.loss_of
        self.seen += [kept.number, sum(kept.history), sum(kept.recent), float(kept.running), kept.flag]
        self.seen += [self.before.calls, self.before.kept["calls"], self.first.calls]
        self.log("mean", self.first.mean)


class EarlyMetrics(Chain):
    """Metrics get values of another rank before the last call of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.total, self.late = MeanMetric(), SumMetric(), SumMetric()  # of float32
        self.bundle = MetricCollection({"sum": SumMetric(), "max": MaxMetric()})
        self.values = [CatMetric()]

    def update(self, values: Tensor) -> None:
        self.mean.update(values[:, 0])
        self.values[0].update(values[:, 0])
        self.total.update(values.sum())
        self.bundle.update(values[:, 1])

    def loss(self, batch: Any) -> Tensor:
        hidden = self.first(batch[0]).tanh()
        self.update(hidden)
        loss = nn.functional.mse_loss(self.last(hidden), batch[1])
        self.late.update(loss * len(batch[0]))
        return loss

    def end(self) -> None:
        numbers = [self.mean, self.total, self.late]
        found = [*(each.compute() for each in numbers), *self.bundle.compute().values()]
        self.seen.append([round(float(value), 3) for value in found] + [len(self.values[0].compute())])
        for metric in (*numbers, *self.values, self.bundle):
            metric.reset()

    on_validation_epoch_start = on_validation_epoch_end = end


def _kept(make: Make, folder: Path, kind: type[Chain], gpp: dict[str, Any]) -> Facts:
    return validated(make, build(kind), num_sanity_val_steps=0, gpp={**staged(kind), **gpp})


ONCE = {"num_micro_batches": 1}
family(
    "kept",
    _kept,
    {
        "decides": {"kind": Decides, "gpp": ONCE},
        "collects": {"kind": Collects, "gpp": {}},
        "long": {"kind": Long, "gpp": ONCE},
        "in_parts": {"kind": InParts, "gpp": ONCE},
        "early_metrics": {"kind": EarlyMetrics, "gpp": {}},
    },
)


class Returns(Chain):
    """All steps return what callbacks read."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "out": self(batch[0]).detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"out": self(batch[0])}

    test_step = validation_step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch[1].square().sum()))


class Reads(pl.Callback):
    """Counts from results and mini-batches, logs what it counts, and writes, as one that knows nothing of ranks."""

    def __init__(self, folder: Path) -> None:
        self.file, self.counts = folder / "lines", torch.zeros(2, 2)

    def count(self, outputs: Any, batch: Any) -> None:
        for place in zip(outputs["out"].argmax(1).tolist(), batch[1].argmax(1).tolist(), strict=True):
            self.counts[place] += 1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *rest: Any) -> None:
        self.count(outputs, batch)

    def on_validation_batch_end(self, *arguments: Any) -> None:
        self.count(*arguments[2:4])

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("counted", self.counts.trace())

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *rest: Any) -> None:
        with self.file.open("a") as file:
            file.write(f"{outputs.sum().item():.9f}\n")


def _read(make: Make, folder: Path, **gpp: Any) -> Facts:
    module, reads = build(Returns), Reads(folder)
    trainer = make(callbacks=[reads], gpp={**staged(Returns), **gpp})
    trainer.fit(module, loader(), loader(10, seed=2))
    facts = {**facts_of(trainer, module), "counts": reads.counts.flatten().tolist()}
    trainer.predict(module, loader(10, seed=4), return_predictions=False)
    trainer.strategy.barrier()
    return {**facts, "lines": reads.file.read_text()}


family("results_read", _read, {"in_micro_batches": {}, "whole": {"step": "whole"}})
