"""What steps change in the module: told where it differs from one process, and lists of any length reach all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.strategy import harness
from tests.strategy.harness import TwoTowers


class Keeps(TwoTowers):
    """Keeps more losses than are sent after each step, and a tensor, and decides by them around mini-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.seen, self.tensors = [0.5] * 63, list[float](), list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss(batch)
        self.kept.append(loss.item())
        self.tensors.append(loss.detach())
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(sum(self.kept))
        if len(self.kept) > 66:
            self.kept.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        """Without that of its base."""


def kept(strategy: Any, devices: int) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    module = Keeps().double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        harness.trainer(strategy, devices, limit_val_batches=0).fit(module, harness.loader(80))
    return module.seen, [str(each.message) for each in caught if "The training step changes" in str(each.message)]


def kept_in_stages(rank: int, num_micro_batches: int) -> tuple[list[float], list[str]]:
    return kept(harness.strategy(num_micro_batches=num_micro_batches), 2)


def test_lists_of_any_length_reach_all_ranks() -> None:
    expected, _ = kept("auto", 1)
    (first, told), (second, _) = harness.run(2, kept_in_stages, 1)
    assert first == second == pytest.approx(expected, rel=1e-12)
    assert [text.partition(".")[0] for text in told] == ["The training step changes tensors"]


def test_steps_that_run_for_each_micro_batch_are_told() -> None:
    _, told = harness.run(2, kept_in_stages, 2)[0]
    assert any(text.startswith("The training step changes tensors. Only the ranks that run the step") for text in told)
    assert any(
        text.startswith("The training step changes kept, tensors. It runs once per micro-batch, 2 t") for text in told
    )
