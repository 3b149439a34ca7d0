"""Copies of weights that hooks make and keep: whole on global rank 0 after the run, and never out of date."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.strategy.harness import TwoTowers, loader, run, strategy, trainer


class Average:
    """A user's average of weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: torch.nn.Module) -> None:
        for name, value in module.named_parameters():
            self.shadow[name].mul_(0.9).add_(value, alpha=0.1)


class Keeps(Callback):
    """Keeps weights in the ways in which users do."""

    def __init__(self) -> None:
        self.best: dict[str, Tensor] = {}
        self.ranked: list[tuple[float, int, dict[str, Tensor]]] = []
        self.modules: list[torch.nn.Module] = []

    def on_train_start(self, machine: Any, module: Any) -> None:
        self.average = Average(module)

    def on_train_batch_end(self, machine: Any, module: Any, *_: Any) -> None:
        self.average.update(module)

    def on_validation_end(self, machine: Any, module: Any) -> None:
        if machine.sanity_checking:
            return
        loss, epoch = float(machine.callback_metrics["val_loss"]), machine.current_epoch
        self.best = copy.deepcopy(module.state_dict())
        heapq.heappush(self.ranked, (loss, epoch, {name: value.clone() for name, value in self.best.items()}))
        self.modules.append(copy.deepcopy(module.left))

    def on_fit_end(self, machine: Any, module: Any) -> None:
        if machine.is_global_zero:
            module.load_state_dict(self.ranked[-1][2])


def kept_on(given: Any, devices: int) -> list[Tensor]:
    torch.manual_seed(0)
    module, keeps = TwoTowers().double(), Keeps()
    machine = trainer(given, devices, callbacks=[keeps])
    machine.fit(module, loader(), loader(10, seed=2))
    if machine.global_rank > 0:
        return []
    dicts = [keeps.best, keeps.average.shadow, *(state for *_, state in sorted(keeps.ranked)), module.state_dict()]
    whole = [*dicts, *(part.state_dict() for part in keeps.modules)]
    return [value.detach() for state in whole for value in state.values()]


def kept_on_ranks(rank: int) -> list[Tensor]:
    return kept_on(strategy(), 2)


def test_copies_are_whole_after_the_run() -> None:
    expected = kept_on("auto", 1)
    found, _ = run(2, kept_on_ranks)
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-11, atol=1e-13)


class Changes(TwoTowers):
    """Reads the weights as they are, through a view that is older."""

    def on_train_epoch_start(self) -> None:
        self.views = [value.detach() for value in self.parameters()]
        self.before = [value.detach().clone() for value in self.parameters()]

    def on_train_epoch_end(self) -> None:
        self.losses += [float(value.norm()) for value in self.views]


class Remembers(Changes):
    """Reads the weights of an earlier hook."""

    def on_train_epoch_end(self) -> None:
        self.losses += [float((value - before).norm()) for value, before in zip(self.views, self.before, strict=True)]


class Doubles(Changes):
    """Reads a copy that it has changed."""

    def on_train_epoch_end(self) -> None:
        for value in self.parameters():
            copied = value.detach().clone()
            copied.mul_(2.0)
            self.losses.append(float(copied.norm()))


class Listed(Changes):
    """Reads what an operator on lists has computed."""

    def on_train_epoch_end(self) -> None:
        self.losses += [float(value.norm()) for value in torch._foreach_mul(self.views, 2.0)]


def losses(given: Any, devices: int, kind: Callable[[], TwoTowers]) -> list[float]:
    torch.manual_seed(0)
    module = kind().double()
    trainer(given, devices).fit(module, loader(), loader(10, seed=2))
    return module.losses


def losses_on_ranks(rank: int, kind: Callable[[], TwoTowers]) -> list[float]:
    return losses(strategy(), 2, kind)


def test_a_view_has_the_present_values() -> None:
    expected = losses("auto", 1, Changes)
    for found in run(2, losses_on_ranks, Changes):
        assert found == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("kind", [Remembers, Doubles, Listed])
def test_values_that_nobody_can_lend_are_an_error(kind: Callable[[], TwoTowers]) -> None:
    with pytest.raises(AssertionError, match="not copies that earlier hooks made, or changed ones"):
        run(2, losses_on_ranks, kind)
