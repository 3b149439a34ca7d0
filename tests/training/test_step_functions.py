"""A step that is a function of a user's file: its global variables are its own, and its parameters are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpp_examples.plain_loop import Batch, Branches, batches, loss_of
from lightning_gpp import Options, initialize
from tests.distributed import run_distributed

calls = 0


def counting(module: Branches, batch: Batch) -> Tensor:
    """A loss that depends on the number of calls so far."""
    global calls
    calls += 1
    return loss_of(module, batch) * calls


def numbered(module: Branches, batch: Batch, batch_idx: int) -> Tensor:
    return loss_of(module, batch) * (1 + batch_idx)


def losses(step: Any, num_micro_batches: int = 1) -> list[float]:
    torch.manual_seed(1)
    model, found = Branches().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = Options(num_micro_batches=num_micro_batches)
    with initialize(model, optimizer, batches()[0], step=step, options=options) as engine:
        for number, batch in enumerate(batches()[:3]):
            found.append(float(engine.train_step(batch, number)))
            optimizer.step()
            optimizer.zero_grad()
    return found


def alone() -> list[float]:
    """Losses of one process, of which the first is multiplied by 1, the second by 2, and so on."""
    torch.manual_seed(1)
    model, found = Branches().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for count, batch in enumerate(batches()[:3], 1):
        loss = loss_of(model, batch) * count
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def counted(rank: int) -> None:
    losses(counting)


def test_a_loss_that_depends_on_what_the_step_changes_outside_of_the_module_is_refused() -> None:
    with pytest.raises(AssertionError, match="changes outside of the module, such as a global variable"):
        run_distributed(1, counted)


def by_number(rank: int) -> list[float]:
    return losses(numbered, 2)


def test_a_step_may_take_the_number_of_the_mini_batch() -> None:
    (found,) = run_distributed(1, by_number)
    assert found == pytest.approx(alone(), rel=1e-12)
