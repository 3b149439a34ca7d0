"""A stage whose gradient is not finite ends asynchronous training on all ranks, before they train on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpp import GPPStrategy
from lightning_gpp.training import setup
from lightning_gpp.training.tensors import replicas
from tests.failure.pipeline_rank import processes_running
from tests.strategy import harness
from tests.strategy.test_asynchronous import CHAIN, Towers, samples

FAILS_AT, LEAD = 5, 2


class Poisoned(Towers):
    """From a mini-batch on the gradient of the first stage is not finite; ranks note their optimizer steps."""

    def __init__(self, rank: int, folder: str) -> None:
        super().__init__(in_line=True)
        self.rank, self.folder, self.backwards = rank, Path(folder), 0
        if rank == 2:
            self.left[2].weight.register_hook(self.poison)

    def poison(self, gradient: Tensor) -> Tensor:
        self.backwards += self.trainer.training
        return gradient * torch.inf if self.backwards > FAILS_AT else gradient

    def on_train_start(self) -> None:
        self.backwards = 0  # the self-check had some

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with (self.folder / str(self.rank)).open("a") as file:
            file.write(".")


def on_rank(rank: int, folder: str) -> None:
    for checked in (setup, replicas):  # the fault is made by a hook on a gradient
        checked.check_no_hooks = lambda *_: None  # type: ignore[attr-defined]
    strategy = GPPStrategy(
        stages=CHAIN,
        weights="stash",
        num_micro_batches=1,
        self_check=False,
        failure_timeout=60.0,
        timeout=60.0,
    )
    trainer = harness.trainer(strategy, devices=3, max_epochs=1)
    trainer.fit(Poisoned(rank, folder), DataLoader(samples(80), batch_size=8))


def as_torchrun_would(rank: int, world_size: int, port: int, folder: str) -> None:
    harness.enter(rank, world_size, port)
    on_rank(rank, folder)


def test_all_ranks_learn_of_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    with processes_running(tmp_path, 3, as_torchrun_would, str(tmp_path)) as running:
        running.wait(50)
    assert all(running.codes), running.codes
    for rank in (0, 1):
        assert f"[rank {rank}] The job ends. First cause: rank 2" in running.output(rank)
        assert "'left.2.weight' in stage 'first' is not finite after mini-batch 5" in running.output(rank)
    steps = [(tmp_path / str(rank)).stat().st_size for rank in range(3)]
    assert steps[2] == FAILS_AT
    assert max(steps) - 1 <= FAILS_AT + LEAD, "the mini-batches whose forwards the first stage had done"
