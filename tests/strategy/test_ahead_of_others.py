"""The rank that runs the step waits for no control message of another rank, however far the others are behind.

Messages with the flow are activations, gradients, and what the step's rank tells the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import GPPStrategy
from tests.strategy import harness
from tests.strategy.test_asynchronous import CHAIN, Towers

STEPS = 12


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
