"""Users' hooks on modules: those that keep values are named in a warning, and captures leave nothing there."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture_step
from lightning_gpp.strategy.hooks.module_hooks import keeping_hooks
from tests.strategy import harness


class Activations(pl.Callback):
    """Keeps what modules compute, in three ways."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Tensor]] = {"left": []}
        self.calls, self.last = 0, None

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        module.left.register_forward_hook(functools.partial(self.keep, "left"))
        module.head.register_forward_pre_hook(self.count)
        module.right.register_full_backward_hook(lambda part, *gradients: setattr(self, "last", gradients))

    def keep(self, name: str, part: nn.Module, args: Any, output: Tensor) -> None:
        self.kept[name].append(output.detach())

    def count(self, part: nn.Module, args: Any) -> None:
        self.calls += 1


def warned(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        harness.trainer(harness.strategy(), 2, callbacks=[Activations()]).fit(harness.make_module(), harness.loader())
    return [str(each.message) for each in caught if "Hooks on modules keep" in str(each.message)]


def test_hooks_that_keep_values_are_named_once() -> None:
    first, other = harness.run(2, warned)
    assert other == []
    (text,) = first
    assert all(part in text for part in (__file__, "'left'", "'head'", "Return such values from the module's forward"))


def scale(part: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Changes a result, and keeps something in the module itself."""
    part.seen = True  # type: ignore[assignment]
    return output * 2


def test_hooks_that_keep_nothing_elsewhere_are_not() -> None:
    module = harness.make_module()
    module.left.register_forward_hook(scale)
    module.right.register_forward_pre_hook(lambda part, args: None)
    assert list(keeping_hooks(module)) == []
    module.head.register_forward_hook(Activations().count)
    assert [path for _, path in keeping_hooks(module)] == ["head"]


def test_captures_leave_nothing_in_callbacks() -> None:
    module, callback = harness.make_module(), Activations()
    module.left.register_forward_hook(lambda part, args, output: callback.kept["left"].append(output.detach()))
    capture_step(module, next(iter(harness.loader())))
    assert callback.kept["left"] == []
    module(torch.zeros(2, 4).double(), torch.zeros(2, 3).double())
    assert len(callback.kept["left"]) == 1
