"""In the steady state a step reads tensors' values only for what is logged, and ranks say little besides their tensors.

On a GPU every read would make the host wait for the device.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from benchmarks.gpu.reads import Counts, counted
from gpp_examples.plain_loop import Branches, batches, loss_of
from lightning_gpp import Options, initialize
from tests.distributed import run_distributed
from tests.strategy import harness

STAGES_OF_LOOP = {"left": 0, "right": 1, "head": 1}
STAGES = {"network.left": 0, "network.right": 1, "network.head": 1}
WARM_UP, STEPS = 9, 4  # between mini-batches whose losses are compared: 0, 1, 2, 4, 8, 16


class Counting(pl.Callback):
    """Counts from one place in a mini-batch to that of another, by a hook that takes neither mini-batch nor result."""

    def __init__(self) -> None:
        self.counting, self.counts = counted(), Counts()

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.fit_loop.batch_idx == WARM_UP:
            self.counts = self.counting.__enter__()
        if trainer.fit_loop.batch_idx == WARM_UP + STEPS:
            self.counting.__exit__(None, None, None)


class Logging(pl.LightningModule):
    """Logs two values in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Branches().double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = loss_of(self.network, batch)
        self.log("loss", loss, prog_bar=True)
        self.log("largest", batch[0].max(), reduce_fx="max")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(rank: int, options: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    torch.manual_seed(0)
    counting = Counting()
    trainer = harness.trainer(
        harness.strategy(stages=STAGES, **options),
        devices=2,
        callbacks=[counting],
        max_epochs=1,
        log_every_n_steps=1000,
    )
    trainer.fit(Logging(), harness.loader(8 * (WARM_UP + STEPS + 2)))
    return counting.counts.reads, counting.counts.messages


FINITE = "training/updates/gradients.py: _not_finite"
LIGHTNING = "Lightning, apply_func.py: to_item"
"""Lightning's own read of a value in the progress bar."""


@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "stop"}], ids=["as is", "finite checks"])
def test_a_trainer_reads_what_is_logged_in_one_transfer(options: dict[str, Any]) -> None:
    (reads, messages), (others_reads, others_messages) = harness.run(2, fitted, options)
    everywhere = Counter({LIGHTNING: STEPS}) + Counter({FINITE: STEPS} if options else {})
    assert reads == everywhere + Counter({"strategy/logs.py: _read": STEPS})
    assert others_reads == everywhere
    agreed = Counter({"all_reduce in training/updates/gradients.py: before_update": STEPS} if options else {})
    told = {
        "strategy/logs.py: exchange": 1,
        "strategy/guard.py: _after_step": 1,
        "training/data/incoming.py: announce": 1,
    }
    assert messages == agreed + Counter({f"isend in {place}": STEPS * count for place, count in told.items()})
    assert others_messages == agreed + Counter({f"recv in {place}": STEPS * count for place, count in told.items()})


def looped(rank: int, options: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    model = Branches().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = Options(**{"stages": STAGES_OF_LOOP, "num_micro_batches": 4, **options})
    with initialize(model, optimizer, batches()[0], step=loss_of, options=given) as engine:
        feed = engine.feed(batches(WARM_UP + STEPS + 2))
        for _ in range(WARM_UP):
            engine.train_step(next(feed))
            optimizer.step()
            optimizer.zero_grad()
        with counted() as counts:
            for _ in range(STEPS):
                engine.train_step(next(feed))
                engine.clip_grad_norm(optimizer, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        for batch in feed:
            engine.train_step(batch)
            optimizer.step()
            optimizer.zero_grad()
    return counts.reads, counts.messages


LOSS = "training/engine.py: train_step"
SUMS = "all_reduce in runtime/gradients.py: start"


@pytest.mark.parametrize(
    ("ranks", "options", "collectives"),
    [
        (2, {}, []),
        (4, {"num_pipelines": 2}, ["all_reduce in training/tensors/replicas.py: agree", SUMS]),
        pytest.param(
            *(4, {"num_pipelines": 2, "sharding": "zero1"}),
            [
                "all_reduce in training/tensors/replicas.py: agree",
                SUMS,
                *["broadcast in runtime/sharding/owners.py: __init__"] * 2,
            ],
            marks=pytest.mark.acceptance,
        ),
    ],
    ids=["a pipeline", "two pipelines", "zero1"],
)
def test_a_loop_reads_nothing_but_the_loss(ranks: int, options: dict[str, Any], collectives: list[str]) -> None:
    for rank, (reads, messages) in enumerate(run_distributed(ranks, looped, options)):
        runs_step = rank % 2 == 0
        assert reads == Counter({LOSS: STEPS} if runs_step else {})
        told = [
            f"{'isend' if runs_step else 'recv'} in {place}" for place in (LOSS, "training/data/incoming.py: announce")
        ]
        expected = Counter([*told, "all_reduce in runtime/gradients.py: norm_over_ranks", *collectives] * STEPS)
        assert messages == expected
