"""Half precision: all ranks have one scale of the loss, and skip the same steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from tests.strategy.harness import STAGES, TwoTowers, loader, run, strategy, trainer


class Overflowing(TwoTowers):
    """Has infinite gradients in one stage, in its third mini-batch; notes the scales."""

    def __init__(self) -> None:
        super().__init__()
        self.right = self.right[:2]
        self.scales: list[float] = []

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.left(a), self.right(b)], dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        return self.loss(batch)[0]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())

    def on_after_backward(self) -> None:
        if len(self.losses) == 2:
            for parameter in self.left.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.inf)

    def on_train_epoch_end(self) -> None:
        """Keep no metrics."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def half() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))


def data() -> DataLoader[Any]:
    batches = [[part.float() if part.is_floating_point() else part for part in batch] for batch in loader(32)]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def overflowing(rank: int, given: Any, devices: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Overflowing()
    machine = trainer(given, devices, plugins=[half()], gradient_clip_val=0.5)
    machine.fit(module, data(), data())
    state = machine.optimizers[0].state.values()
    return {"losses": module.losses, "scales": module.scales, "steps": {int(each["step"]) for each in state}}


def on_two_ranks(rank: int) -> dict[str, Any]:
    return overflowing(rank, strategy(stages=STAGES), 2)


def test_one_infinite_gradient_skips_the_step_on_all_ranks() -> None:
    expected = overflowing(0, "auto", 1)
    scales = expected["scales"]
    assert any(later < earlier for earlier, later in zip(scales, scales[1:], strict=False)), "a step was skipped"
    for found in run(2, on_two_ranks):
        assert found["scales"] == scales
        assert found["steps"] == expected["steps"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-2)
