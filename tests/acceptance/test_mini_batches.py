"""Mini-batches that change their form train architectures of transformers as one process does."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.strategy import harness

pytest.importorskip("transformers")

from tests.acceptance.mini_batches import TASKS

Run = tuple[list[float], Tensor]
"""Losses of all mini-batches, and all parameters after them."""


def fit(name: str, ranks: int) -> Run:
    task = TASKS[name]
    module = task.module()
    options = {"num_micro_batches": 2, "max_replicas": 1, "search_seconds": 0.5, "stages": None, **task.options}
    strategy = harness.strategy(**options) if ranks > 1 else "auto"
    trainer = harness.trainer(strategy, ranks, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(task.batches(), batch_size=None))  # type: ignore[arg-type]
    return module.losses, module.trained


def train(rank: int, name: str, ranks: int) -> Run | None:
    found = fit(name, ranks)
    return found if rank == 0 else None


@pytest.mark.acceptance
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", TASKS)
def test_real_mini_batches_train_as_in_one_process(name: str, ranks: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses, parameters = fit(name, 1)
    found, trained = harness.run(ranks, train, name, ranks)[0]
    assert found == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(trained, parameters, rtol=1e-12, atol=1e-14)
