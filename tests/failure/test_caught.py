"""Exceptions that every rank raises, and catches: they end no process, and later runs are as if nothing had been."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_gpp.errors import GPPError
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.failure.processes import say
from tests import interpreter
from tests.failure.pipeline_rank import Rank, job, processes_running
from tests.strategy import harness

# --- the watch


def all_raising(rank: Rank) -> None:
    rank.exchange()
    time.sleep(0.3 * rank.rank)
    raise ValueError(f"from rank {rank.rank}")


def test_an_exception_of_all_ranks_is_everybodys_own(tmp_path: Path) -> None:
    with job(tmp_path, all_raising) as running:
        running.wait(30)
    assert running.codes == [1, 1, 1]
    for rank in range(3):
        assert f"ValueError: from rank {rank}" in running.output(rank)
        assert ("All ranks have raised exceptions. First cause: rank 0 " in running.output(rank)) == (rank > 0)
        assert "The job ends" not in running.output(rank)


def all_refusing(rank: Rank) -> None:
    """Ends as a script does whose error nobody catches."""
    rank.exchange()
    try:
        raise GPPError("None of this works.")
    except GPPError as error:
        sys.excepthook(GPPError, error, error.__traceback__)


def test_a_refusal_of_all_ranks_is_shown_by_rank_0(tmp_path: Path) -> None:
    with job(tmp_path, all_refusing) as running:
        running.wait(30)
    assert "Traceback" in running.output(0)
    assert "GPPError: None of this works." in running.output(0)
    for rank in (1, 2):
        assert "Traceback" not in running.output(rank)
        assert f"[rank {rank}] GPPError, as on rank 0, which shows it." in running.output(rank)


def raising_and_going_on(rank: Rank) -> None:
    """All ranks raise three times; then one raises alone while the others wait for it."""
    for number in range(3):
        rank.exchange()
        try:
            raise ValueError(number)
        except ValueError as error:
            reports = [rank.monitor.report(error) for _ in range(2)]  # the second changes nothing
        print(f"together: {reports}", flush=True)
    if rank.rank == 2:
        raise RuntimeError("alone")
    rank.exchange()


def test_the_watch_goes_on_after_an_exception_of_all_ranks(tmp_path: Path) -> None:
    with job(tmp_path, raising_and_going_on) as running:
        running.wait(30)
    assert running.codes == [1, 1, 1]
    for rank in range(3):
        assert running.output(rank).count("together: [True, True]") == 3, running.output()
        assert "First cause: rank 2" in running.output(rank)


def raising_late(rank: Rank) -> None:
    rank.exchange()
    time.sleep(0 if rank.rank else 60)
    raise ValueError(f"from rank {rank.rank}")


def test_a_rank_that_does_not_raise_soon_is_ended(tmp_path: Path) -> None:
    with job(tmp_path, raising_late) as running:
        running.wait(30)
    assert running.codes == [1, 1, 1]
    assert "First cause: rank" in running.output(0)


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
    """Raises in a hook, on all ranks."""

    def __init__(self, **hooks: int) -> None:
        self.left = hooks

    def reach(self, name: str) -> None:
        self.left[name] = self.left.get(name, 0) - 1
        if self.left[name] == 0:
            raise ValueError(f"stopped in {name}")

    def on_train_batch_end(self, *_: Any) -> None:
        self.reach("training")

    def on_validation_end(self, *_: Any) -> None:
        self.reach("validation")


class StopsInHook(harness.TwoTowers):
    """Raises in a hook of the module, of which other ranks take over the outcome."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise ValueError("stopped in hook")


class StopsInStep(harness.TwoTowers):
    """Raises in the second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise ValueError("stopped in step")
        return result


MODULES = {"step": StopsInStep, "hook": StopsInHook}


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
    module = MODULES.get(how, harness.TwoTowers)().double()
    said = attempt(options, module, [Stops(**{how: 1}), OnExceptionCheckpoint(folder)])
    left = weights(module)
    module = harness.make_module()
    assert attempt({}, module, []) == "complete"
    return said, left, weights(module)


@pytest.mark.parametrize(
    "how",
    [
        "training",
        pytest.param("validation", marks=pytest.mark.acceptance),
        "step",
        pytest.param("hook", marks=pytest.mark.acceptance),
    ],
)
def test_a_run_after_a_caught_exception(tmp_path: Path, how: str) -> None:
    (first, left, trained), (second, _, _) = harness.run(2, stopped_then_trained, how, str(tmp_path))
    assert first.startswith("stopped in")
    assert first == second
    alone = harness.make_module()
    harness.trainer(max_epochs=1).fit(alone, harness.loader(), harness.loader(16))
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-9, atol=1e-9)
    (file,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(file, weights_only=False)["state_dict"]
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


@pytest.mark.acceptance
def test_an_error_after_the_run_is_the_exit_code_of_the_job(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "from tests.strategy import harness\n"
        "class Late(harness.TwoTowers):\n"
        "    def on_fit_end(self):\n"
        "        if self.global_rank == 1: raise ValueError('late')\n"
        "harness.trainer(harness.strategy(self_check=False), 2, max_epochs=1).fit(Late().double(), harness.loader(8))\n"
    )
    ended = interpreter.run(str(script), cwd=tmp_path, timeout=150)
    assert ended.returncode == 1, ended.stderr
    assert "ValueError: late" in ended.stderr


def leave(rank: int, world_size: int, port: int, leaving: tuple[int, ...]) -> None:
    class Leaving(harness.TwoTowers):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_rank in leaving:
                sys.exit(0)

    harness.enter(rank, world_size, port)
    harness.trainer(harness.strategy(), 2).fit(Leaving().double(), harness.loader())


@pytest.mark.parametrize(("leaving", "code"), [((0, 1), 0), ((1,), 1)])
def test_all_ranks_may_leave_together(tmp_path: Path, leaving: tuple[int, ...], code: int) -> None:
    with processes_running(tmp_path, 2, leave, leaving) as running:
        running.wait(60)
    assert running.codes == [code, code], running.output()


def test_the_log_has_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        say("the first cause")
    assert "the first cause" in caplog.messages
