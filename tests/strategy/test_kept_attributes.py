"""What the step keeps in attributes is on all ranks, before hooks, optimizers and schedulers may read it."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.training.mirrored_state import MirroredState
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
    return [decided(harness.strategy(num_micro_batches=number), 2) for number in (1, 2)]


def test_decisions_of_all_ranks_follow_from_the_step() -> None:
    ((losses, dropped, rate),) = harness.run(1, on_one_device)
    assert len(set(dropped)) == 2
    (whole, parts), (other_whole, other_parts) = harness.run(2, in_stages)
    assert whole[0] == pytest.approx(losses, rel=1e-12)
    assert whole[1] == other_whole[1] == dropped
    assert whole[2] == pytest.approx(rate, rel=1e-12)
    assert whole[2] == other_whole[2]
    assert parts == other_parts


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.number, self.text, self.none, self.numbers = 1.0, "a", None, [1, 2]
        self.tensor, self.array, self.large = torch.zeros(2), np.zeros(2), torch.zeros(1 << 15)
        self.inside, self.tensors = {"a": 1}, [torch.ones(1)]
        self.recent = deque([1.0], maxlen=2)


def step(module: Any) -> None:
    module.number, module.text, module.none, module.large = 2.0, "b", 3, module.large + 1
    module.numbers.append(3)
    module.tensor.add_(1)
    module.array += 1
    module.inside["b"], module.made = 2, torch.ones(2)
    module.tensors.append(torch.ones(1))
    module.recent.append(2.0)


def test_values_are_found_and_taken_over() -> None:
    module, other = Keeps(), Keeps()
    control: Any = SimpleNamespace(runs_step=True)  # what is asked here needs no other rank
    mirrored, there = (MirroredState(each, control, torch.device("cpu")) for each in (module, other))
    mirrored.begin()
    assert not mirrored.end()
    step(module)
    changed = mirrored.end()
    before = other.numbers
    there.take(pickle.loads(pickle.dumps(changed)))
    assert not changed.keys() & {("", "large"), ("", "tensors"), ("", "layer"), ("", "array")}
    assert (other.number, other.text, other.none, other.numbers) == (2.0, "b", 3, [1, 2, 3])
    assert other.numbers is before
    assert (other.tensor.tolist(), other.made.tolist()) == ([1, 1], [1, 1])
    assert (other.inside, list(other.recent)) == ({"a": 1, "b": 2}, [1.0, 2.0])
    mirrored.begin()
    assert not mirrored.end()


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
