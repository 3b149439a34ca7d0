"""In the steady state a step reads tensors' values only for what is logged, and ranks say little besides their tensors.

On a GPU every read would make the host wait for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from gpp_examples.plain_loop import Branches, batches, loss_of
from lightning_gpp import Options, initialize
from tests.distributed import run_distributed
from tests.strategy import harness

STAGES_OF_LOOP = {"left": 0, "right": 1, "head": 1}
STAGES = {"network.left": 0, "network.right": 1, "network.head": 1}
WARM_UP, STEPS = 9, 4  # between mini-batches whose losses are compared: 0, 1, 2, 4, 8, 16


MESSAGES = ("isend", "recv", "send", "irecv", "all_reduce", "broadcast", "barrier", "all_gather", "gather")
READS = ("item", "__float__", "__bool__", "tolist", "numpy", "cpu")


class Reads(TorchFunctionMode):
    """Counts reads of tensors that stages compute; numbers of the side channel are integers on the CPU."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in READS and (args[0].is_floating_point() or args[0].dtype is torch.bool):
            self.counts["read"] += 1
        return func(*args, **(kwargs or {}))


def noted(function: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        counts[function.__name__] += 1
        return function(*args, **kwargs)

    return run


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count reads, and calls of `torch.distributed`; values of the stages go through its process groups."""
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        for name in MESSAGES:
            stack.enter_context(mock.patch.object(dist, name, noted(getattr(dist, name), counts)))
        stack.enter_context(Reads(counts))
        yield counts


class Counting(pl.Callback):
    """Counts from one place in a mini-batch to that of another, by a hook that takes neither mini-batch nor result."""

    def __init__(self) -> None:
        self.counting, self.counts = counted(), Counter[str]()

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


def fitted(rank: int, options: dict[str, Any]) -> Counter[str]:
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
    return counting.counts


@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "stop"}], ids=["as is", "finite checks"])
def test_a_trainer_reads_what_is_logged_in_one_transfer(options: dict[str, Any]) -> None:
    """Lightning itself reads a value for the progress bar; the logs, the step's end and the data are announced."""
    of_step, other = harness.run(2, fitted, options)
    finite = Counter({"read": 1, "all_reduce": 1} if options else {})
    for found, once in ((of_step, {"read": 2, "isend": 3}), (other, {"read": 1, "recv": 3})):
        assert found == Counter({name: STEPS * count for name, count in (finite + Counter(once)).items()})


def looped(rank: int, options: dict[str, Any]) -> Counter[str]:
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
    return counts


@pytest.mark.parametrize(
    ("ranks", "options", "collectives"),
    [
        (2, {}, {"all_reduce": 1}),
        (4, {"num_pipelines": 2}, {"all_reduce": 3}),
        pytest.param(
            *(4, {"num_pipelines": 2, "sharding": "zero1"}, {"all_reduce": 3, "broadcast": 2}),
            marks=pytest.mark.acceptance,
        ),
    ],
    ids=["a pipeline", "two pipelines", "zero1"],
)
def test_a_loop_reads_nothing_but_the_loss(ranks: int, options: dict[str, Any], collectives: dict[str, int]) -> None:
    """Collectives: the norm; with pipelines, their agreement and sums of gradients; the parameters of owners."""
    for rank, found in enumerate(run_distributed(ranks, looped, options)):
        once = {"read": 1, "isend": 2} if rank % 2 == 0 else {"recv": 2}
        assert found == Counter({name: STEPS * count for name, count in {**once, **collectives}.items()})
