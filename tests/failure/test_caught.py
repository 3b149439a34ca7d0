"""Exceptions that every rank raises, and catches: they end no process, and later runs are as if nothing had been."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_gpp.errors import GPPError
from lightning_gpp.failure.monitor import FailureMonitor
from tests.failure.pipeline_rank import Rank, job, processes_running
from tests.strategy import harness

# --- the watch


def raising_and_going_on(how: str, rank: Rank) -> None:
    """All ranks raise three times; then one raises alone while the others wait for it."""
    for number in range(3):
        rank.exchange()
        try:
            if how == "apart" and rank.rank == 1:
                raise KeyError(number)
            raise ValueError(number)
        except (ValueError, KeyError) as error:
            reports = [rank.monitor.report(error) for _ in range(2)]  # the second changes nothing
        print(f"together: {reports}", flush=True)
    if rank.rank == 2:
        raise RuntimeError("alone")
    rank.exchange()


@pytest.mark.parametrize("how", ["together", "apart"])
def test_the_watch_goes_on_after_an_exception_of_all_ranks(tmp_path: Path, how: str) -> None:
    with job(tmp_path, functools.partial(raising_and_going_on, how)) as running:
        running.wait(30)
    assert running.codes == [1, 1, 1]
    for rank in range(3):
        assert running.output(rank).count(f"together: {[how == 'together'] * 2}") == 3, running.output()
        assert "First cause: rank 2" in running.output(rank)


def raising_alone_and_starting_again(rank: Rank) -> None:
    rank.exchange()
    try:
        if rank.rank == 0:
            raise ValueError("alone")
        rank.exchange()
    except ValueError as error:
        rank.monitor.report(error)
    try:
        FailureMonitor(rank=rank.rank, world_size=rank.world_size).start()
    except GPPError as error:
        print(error, flush=True)


def test_a_rank_that_has_ended_the_others_cannot_start_again(tmp_path: Path) -> None:
    with job(tmp_path, raising_alone_and_starting_again) as running:
        running.wait(30)
    assert running.codes == [0, 1, 1]
    assert "The other ranks of this job have ended. First cause: rank 0" in running.output(0)
    assert "start the script again" in running.output(0)


# --- runs of a trainer


class Stops(pl.Callback):
    """Raises in a hook, on all ranks: the hook of a number of its call, which may differ between ranks."""

    def __init__(self, **hooks: int) -> None:
        self.left = hooks

    def reach(self, name: str) -> None:
        self.left[name] = self.left.get(name, 0) - 1
        if self.left[name] == 0:
            raise ValueError(f"stopped in {name}")

    def on_train_batch_end(self, *_: Any) -> None:
        self.reach("training")

    def on_train_batch_start(self, *_: Any) -> None:
        self.reach("start")

    def on_validation_end(self, *_: Any) -> None:
        self.reach("validation")


class StopsInStep(harness.TwoTowers):
    """Raises in the second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise ValueError("stopped in step")
        return result


def attempt(options: dict[str, Any], module: pl.LightningModule, callbacks: list[pl.Callback]) -> str:
    saves = {"callbacks": callbacks, "enable_checkpointing": bool(callbacks)}
    trainer = harness.trainer(harness.strategy(**options), devices=2, max_epochs=1, **saves)
    try:
        trainer.fit(module, harness.loader(), harness.loader(16))
    except ValueError as error:
        return str(error)
    return "complete"


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items() if not tensor.is_meta}


def stopped_then_trained(rank: int, how: str, folder: str) -> tuple[str, Any, Any]:
    """An attempt that is stopped, and one that is not."""
    options: dict[str, Any] = {"step": "whole"} if how == "step" else {}
    module = (StopsInStep if how == "step" else harness.TwoTowers)().double()
    hooks = {"apart": {"training": 1} if rank else {"start": 2}}.get(how, {how: 1})
    said = attempt(options, module, [Stops(**hooks), OnExceptionCheckpoint(folder)])
    left = weights(module)
    module = harness.make_module()
    assert attempt({}, module, []) == "complete"
    return said, left, weights(module)


@pytest.mark.parametrize(
    "how",
    ["training", pytest.param("validation", marks=pytest.mark.acceptance), "step", "apart"],
)
def test_a_run_after_a_caught_exception(tmp_path: Path, how: str) -> None:
    (first, left, trained), (second, _, _) = harness.run(2, stopped_then_trained, how, str(tmp_path))
    assert first.startswith("stopped in")
    assert (first == second) is (how != "apart")
    alone = harness.make_module()
    harness.trainer(max_epochs=1).fit(alone, harness.loader(), harness.loader(16))
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-9, atol=1e-9)
    files = list(tmp_path.rglob("*.ckpt"))
    assert len(files) == (how != "apart")
    if files:
        saved = torch.load(files[0], weights_only=False)["state_dict"]
        assert list(left) == list(saved) == list(weights(alone))
        assert all(torch.equal(saved[name], left[name]) for name in saved)


# --- hooks that fail on one rank


HOOKS = "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"
ERRORS = (
    ValueError("a"),
    torch.OutOfMemoryError("b"),
    RuntimeError("CUDA error: an illegal memory access"),
)


class Failing(harness.TwoTowers):
    """A hook fails on a rank that has no results of the step, but not for lack of them."""

    def fail(self, error: Exception, *_: Any, **__: Any) -> None:
        if self.global_rank == 1:
            raise error


def fit_with_a_failing_hook(rank: int, world_size: int, port: int, error: Exception, hook: str) -> None:
    harness.enter(rank, world_size, port)
    kind = type("Failing", (Failing,), {hook: lambda self, *args: self.fail(error)})
    harness.trainer(harness.strategy(), 2).fit(kind().double(), harness.loader())


@pytest.mark.parametrize(("error", "hook"), list(zip(ERRORS, HOOKS, strict=True)))
def test_an_error_in_a_hook_of_one_rank_ends_the_run(tmp_path: Path, error: Exception, hook: str) -> None:
    with processes_running(tmp_path, 2, fit_with_a_failing_hook, error, hook) as running:
        running.wait(60)
    assert running.codes == [1, 1], running.output()
    assert re.search(rf"rank 1 .* raised {type(error).__name__}: {error}", running.output(0)), running.output()
