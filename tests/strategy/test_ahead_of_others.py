"""The rank that runs the step waits for no control message of another rank, however far the others are behind.

Messages with the flow are activations, gradients, and what the step's rank tells the others.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import GPPStrategy
from tests.strategy import harness
from tests.strategy.test_asynchronous import CHAIN, Towers

STEPS = 12
PATIENCE = 15.0
LEAD = {0: 0, 1: 1, 2: 2}
"""Mini-batches by which each rank of the chain is ahead, with one micro-batch per mini-batch."""


class Dawdling(Towers):
    """Its ranks upstream end an optimizer step only when the step's rank is ahead of them by all that it can be."""

    def __init__(self, rank: int, folder: str) -> None:
        super().__init__(in_line=True)
        self.rank, self.done = rank, Path(folder) / "done"
        self.steps = 0
        self.gaps: list[int] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self.dawdle)
        return optimizer

    def dawdle(self, *_: object) -> None:
        if self.rank:
            self.wait_for(min(self.steps + LEAD[self.rank], STEPS - 1))
        self.steps += 1
        if not self.rank:
            with self.done.open("a") as file:
                file.write(".")

    def wait_for(self, step: int) -> None:
        """Wait until the step's rank is done with its optimizer step of this number."""
        deadline = time.monotonic() + PATIENCE
        while (done := self.done.stat().st_size if self.done.exists() else 0) <= step:
            assert time.monotonic() < deadline, f"rank {self.rank}: the step's rank did {done} steps, not {step + 1}"
            time.sleep(0.01)
        self.gaps.append(done - 1 - self.steps)


def on_rank(rank: int, folder: str) -> tuple[int, list[int]]:
    module = Dawdling(rank, folder)
    strategy = GPPStrategy(stages=CHAIN, weights="stash", num_micro_batches=1, failure_timeout=60.0, timeout=120.0)
    data = TensorDataset(
        *(torch.randn(4 * STEPS, n, dtype=torch.float64) for n in (4, 3)), torch.zeros(4 * STEPS).long()
    )
    harness.trainer(strategy, devices=3, max_epochs=1).fit(module, DataLoader(data, batch_size=4))
    return module.steps, module.gaps


def test_the_rank_of_the_step_gets_as_far_ahead_as_the_program_lets_it(tmp_path: Path) -> None:
    results = harness.run(3, on_rank, str(tmp_path))
    assert [steps for steps, _ in results] == [STEPS] * 3
    for rank, (_, gaps) in enumerate(results):
        if rank:
            assert gaps[: STEPS - LEAD[rank]] == [LEAD[rank]] * (STEPS - LEAD[rank])


BLOCKING = ("recv", "all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "broadcast_object_list")


class Counting(Towers):
    """Notes what a rank waits for in steps of the steady state, besides activations and gradients."""

    def __init__(self) -> None:
        super().__init__(in_line=True)
        self.waits: list[tuple[str, int | None]] = []

    def on_train_start(self) -> None:
        for name in BLOCKING:
            setattr(dist, name, self.noted(name, getattr(dist, name)))

    def noted(self, name: str, plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if 0 < self.trainer.global_step < STEPS - 3 and not kwargs.get("async_op"):
                self.waits.append((name, kwargs.get("src", kwargs.get("group_src"))))
            return plain(*args, **kwargs)

        return call


def count(rank: int) -> list[tuple[str, int | None]]:
    module = Counting()
    strategy = GPPStrategy(stages=CHAIN, weights="stash", num_micro_batches=1, failure_timeout=60.0, timeout=60.0)
    data = TensorDataset(
        *(torch.randn(4 * STEPS, n, dtype=torch.float64) for n in (4, 3)), torch.zeros(4 * STEPS).long()
    )
    trainer = harness.trainer(strategy, devices=3, max_epochs=1, gradient_clip_val=0.1, log_every_n_steps=1)
    trainer.fit(module, DataLoader(data, batch_size=4))
    return module.waits


def test_nobody_waits_for_a_message_against_the_flow() -> None:
    first, *others = harness.run(3, count)
    assert first == []
    for waits in others:
        assert len(waits) >= STEPS - 4
        assert set(waits) == {("recv", 0)}
