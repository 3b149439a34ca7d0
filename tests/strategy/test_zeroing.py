"""`on_before_zero_grad` comes after the forwards, and sees the gradients and weights that it sees on one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.strategy import harness
from tests.strategy.harness import loader

STAGES = {"left": 1, "target": 1, "right": 0}


class Moving(pl.LightningModule):
    """A target that the hook moves, where the step has used it already, and the gradients that the hook sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.target, self.right = nn.Linear(4, 6), nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 6)
        self.losses: list[float] = []
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.right(self.left(batch[0]).tanh()), self.target(batch[0]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([*self.left.parameters(), *self.right.parameters()], lr=0.05)

    def move(self) -> None:
        here = {name: each.grad for name, each in self.named_parameters() if not each.is_meta}
        self.seen.append({name: 0.0 if grad is None else float(grad.norm()) for name, grad in here.items()})
        for mean, weight in zip(self.target.parameters(), self.left.parameters(), strict=True):
            mean.data.lerp_(weight.data, 0.5)


class MovesItself(Moving):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.move()


class Mover(pl.Callback):
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.move()


def trained(by: str, strategy: Any, devices: int, **options: Any) -> tuple[list[float], list[dict[str, float]]]:
    module = (MovesItself() if by == "module" else Moving()).double()
    callbacks = [Mover()] if by == "callback" else []
    harness.trainer(strategy, devices, callbacks=callbacks, max_epochs=1, **options).fit(module, loader())
    return module.losses, module.seen


def in_stages(rank: int, by: str, options: dict[str, Any]) -> tuple[list[float], list[dict[str, float]]]:
    return trained(by, harness.strategy(stages=STAGES, num_micro_batches=2), 2, **options)


@pytest.mark.parametrize(("by", "options"), [("module", {}), ("callback", {"accumulate_grad_batches": 2})])
def test_the_hook_sees_what_it_sees_on_one_process(by: str, options: dict[str, Any]) -> None:
    losses, seen = trained(by, "auto", 1, **options)
    assert any(seen[-1].values())
    assert losses != pytest.approx(trained("nobody", "auto", 1, **options)[0], rel=1e-6)
    found = harness.run(2, in_stages, by, options)
    for here, there in found:
        assert here == pytest.approx(losses, rel=1e-12)
        for mine, wanted in zip(there, seen, strict=True):
            assert mine == pytest.approx({name: wanted[name] for name in mine}, rel=1e-12)
    assert {*found[0][1][0], *found[1][1][0]} == set(seen[0])
