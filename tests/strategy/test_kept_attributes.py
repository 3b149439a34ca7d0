"""What the step keeps in attributes is on all ranks, before hooks, optimizers and schedulers may read it."""

from __future__ import annotations

import pickle
import re
import warnings
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture.places import outside_kept, outside_of_steps
from lightning_gpp.training.step_attributes import StepAttributes, take_over
from tests.strategy import harness
from tests.strategy.harness import TwoTowers


class Deciding(TwoTowers):
    """Drops gradients of losses that grow, and learns at a rate that follows from the loss; both read what it kept."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.state = torch.zeros(()), {"rate": 1.0}
        self.before, self.dropped = 0.0, list[bool]()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        output = super().training_step(batch, batch_idx)
        self.last = output["loss"].detach()
        self.state["rate"] = 1 / (1 + float(self.last))
        return output

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.dropped.append(float(self.last) > self.before)
        self.before = float(self.last)
        if self.dropped[-1]:
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: self.state["rate"])
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def decided(strategy: Any, devices: int) -> tuple[list[float], list[bool], float]:
    torch.manual_seed(0)
    module = Deciding().double()
    trainer = harness.trainer(strategy, devices)
    trainer.fit(module, harness.loader())
    return module.losses, module.dropped, trainer.optimizers[0].param_groups[0]["lr"]


def on_one_device(rank: int) -> tuple[list[float], list[bool], float]:
    return decided("auto", 1)


def in_stages(rank: int) -> list[Any]:
    whole = decided(harness.strategy(num_micro_batches=1), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = decided(harness.strategy(num_micro_batches=2), 2)
    return [whole, parts, " ".join(str(each.message) for each in caught)]


def test_decisions_of_all_ranks_follow_from_the_step() -> None:
    ((losses, dropped, rate),) = harness.run(1, on_one_device)
    assert len(set(dropped)) == 2
    (whole, parts, told), (other_whole, other_parts, _) = harness.run(2, in_stages)
    assert whole[0] == pytest.approx(losses, rel=1e-12)
    assert whole[1] == other_whole[1] == dropped
    assert whole[2] == pytest.approx(rate, rel=1e-12)
    assert whole[2] == other_whole[2]
    assert parts[1:] == other_parts[1:]
    assert re.search(r"sets last, and Deciding.on_before_optimizer_step reads it.*strategy.step=whole", told)
    assert "sets state, and Deciding.configure_optimizers reads it" in told


class Counting(TwoTowers):
    """Counts calls, in two places, and samples."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.samples, self.history = 0, 0, {"steps": 0}

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.calls += 1
        self.history["steps"] += 1
        self.samples += len(batch[0])
        return super().training_step(batch, batch_idx)


def counted(rank: int) -> tuple[int, int, list[str]]:
    module = Counting().double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        harness.trainer(harness.strategy(num_micro_batches=2), 2).fit(module, harness.loader())
    told = [str(each.message) for each in caught]
    return module.calls, module.samples, [text for text in told if "counts its calls" in text]


def test_a_counter_of_calls_is_told_and_one_of_samples_is_not() -> None:
    """In two epochs of three mini-batches."""
    (calls, samples, told), (*_, others) = harness.run(2, counted)
    assert (calls, samples) == (2 * 2 * 3, 2 * 22)
    assert [re.findall(r"calls in (.*?): ", text) for text in told] == [["calls"], ["history['steps']"]]
    assert not others


class Moving(TwoTowers):
    """Keeps what hooks of epochs read: values of the last micro-batch, and others that are those of one process."""

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.total, self.factor, self.own, self.samples = 0.0, torch.zeros(()), 1.0, 0.0, 0
        self.images, self.state = torch.zeros(()), {"last": 0.0}
        self.history = list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        output = super().training_step(batch, batch_idx)
        loss = output["loss"].detach()
        self.beta += 1e-3
        self.total = self.total + loss
        self.factor, self.own = 1 / (1 + self.trainer.global_step), float(loss)
        self.samples += len(batch[0])
        self.images, self.state["last"] = batch[0][:, :2], float(loss)
        return output

    def on_train_epoch_start(self) -> None:
        self.own = 0.0

    def on_train_epoch_end(self) -> None:
        self.history.append(self.beta + float(self.total) + self.factor + self.samples + self.state["last"])


class Pictures(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.shape = module.images.shape


def moved(rank: int, num_micro_batches: int) -> list[str]:
    module = Moving().double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = harness.strategy(num_micro_batches=num_micro_batches)
        harness.trainer(strategy, 2, callbacks=[Pictures()]).fit(module, harness.loader())
    return [found for each in caught for found in re.findall(r"sets (.*? reads) it: the step runs", str(each.message))]


def test_values_of_micro_batches_that_hooks_read_are_told() -> None:
    told, others = harness.run(2, moved, 2)
    assert sorted(told) == [
        "beta, and Moving.on_train_epoch_end reads",
        "images, and Pictures.on_train_batch_end reads",
        "state, and Moving.on_train_epoch_end reads",
        "total, and Moving.on_train_epoch_end reads",
    ]
    assert not others


def test_values_of_one_micro_batch_are_those_of_the_mini_batch() -> None:
    assert harness.run(2, moved, 1) == [[], []]


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.number, self.text, self.none, self.numbers = 1.0, "a", None, [1, 2]
        self.tensor, self.array, self.large = torch.zeros(2), np.zeros(2), torch.zeros(1 << 15)
        self.state, self.inside, self.tensors = (
            SimpleNamespace(count=0, inner={"x": torch.ones(1)}),
            {"a": 1},
            [torch.ones(1)],
        )
        self.recent = deque([1.0], maxlen=2)


def step(module: Any) -> None:
    module.number, module.text, module.none, module.large = 2.0, "b", 3, module.large + 1
    module.numbers.append(3)
    module.tensor.add_(1)
    module.array += 1
    module.state.count, module.state.inner["x"] = 1, torch.ones(1, requires_grad=True) * 2
    module.inside["b"], module.made = 2, torch.ones(2)
    module.tensors.append(torch.ones(1))
    module.recent.append(2.0)


def test_small_values_are_found_and_taken_over() -> None:
    module, other = Keeps(), Keeps()
    attributes = StepAttributes(module)
    attributes.note()
    assert not attributes.changed()
    step(module)
    changed = attributes.changed()
    take_over(other, pickle.loads(pickle.dumps(changed)), torch.device("cpu"))
    assert not changed.keys() & {("", "large"), ("", "tensors"), ("", "layer")}
    assert (other.number, other.text, other.none, other.numbers) == (2.0, "b", 3, [1, 2, 3])
    assert (other.tensor.tolist(), other.array.tolist(), other.made.tolist()) == ([1, 1], [1, 1], [1, 1])
    assert (other.state.count, other.state.inner["x"].item(), other.inside) == (1, 2.0, {"a": 1, "b": 2})
    assert list(other.recent) == [1.0, 2.0]
    attributes.note()
    assert not attributes.changed()


LARGE = dict.fromkeys(range(1000), 0.0)
NESTED: dict[str, list[int]] = {"sizes": []}


class NamesGlobals(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        LARGE[batch_idx] += 1
        NESTED["sizes"].append(batch_idx)


def test_changes_inside_of_large_and_nested_containers_outside_are_found() -> None:
    module = NamesGlobals()
    attributes = StepAttributes(module, outside=outside_of_steps(module))
    attributes.note()
    assert not attributes.changed()
    module.training_step(None, 7)
    changed = attributes.changed()
    assert {key[1] for key in changed} == {"LARGE", "NESTED"}
    attributes.note()
    assert not attributes.changed()
    with outside_kept(module):
        module.training_step(None, 8)
    assert NESTED == {"sizes": [7]}


@dataclass
class Found:
    """What a step collects."""

    batch: int
    share: float


class Collecting(TwoTowers):
    """Decides at the ends of epochs by lists that its steps have filled."""

    def __init__(self) -> None:
        super().__init__()
        self.hits: list[Tensor] = []
        self.trained: dict[str, list[Tensor]] = {"losses": []}
        self.shares: list[float] = []
        self.pairs: list[tuple[int, float]] = []
        self.found: list[Found] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        output = super().training_step(batch, batch_idx)
        self.trained["losses"].append(output["logits"].square().sum())
        return output

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.hits.append(self.loss(batch)[1].argmax(1) == batch[2])
        share = float(self.hits[-1].double().mean())
        self.pairs.append((batch_idx, share))
        self.found.append(Found(batch_idx, share))

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        share = sum(int(each.sum()) for each in self.hits) / max(1, sum(map(len, self.hits)))
        self.hits.clear()
        self.shares += [share, *(value for _, value in self.pairs), *(each.share for each in self.found)]
        self.pairs.clear()
        self.found.clear()
        for parameter in self.parameters():
            parameter.mul_(1.0 - 0.5 * share)

    def on_train_epoch_end(self) -> None:
        self.shares.append(float(sum(self.trained["losses"])))
        self.trained["losses"].clear()


def collected(strategy: Any, devices: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    module = Collecting().double()
    harness.trainer(strategy, devices).fit(module, harness.loader(), harness.loader(10, seed=2))
    return module.losses, module.shares


def collected_in_stages(rank: int) -> tuple[list[float], list[float]]:
    return collected(harness.strategy(), 2)


def test_lists_that_steps_fill_are_on_all_ranks() -> None:
    losses, shares = collected("auto", 1)
    for found in harness.run(2, collected_in_stages):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert found[1] == pytest.approx(shares, rel=1e-10)
