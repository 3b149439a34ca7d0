"""Where there is no script, as in notebooks, processes are forked: they train as one process does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.distributed import PATIENCE
from tests.strategy.test_launch import outcome, start, succeeded

TRAINING = """
import sys
import torch
from lightning import Trainer
from lightning_gpp import GPPStrategy
from tests.strategy.harness import TwoTowers, loader

QUIET = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
             enable_model_summary=False)

def trained(devices, strategy):
    torch.manual_seed(0)
    module = TwoTowers().double()
    trainer = Trainer(strategy=strategy, devices=devices, max_epochs=2, **QUIET)
    trainer.fit(module, loader())
    return module.state_dict(), trainer.callback_metrics["train_loss"].item()
"""
IN_A_NOTEBOOK = """
sys.ps1 = "In: "  # by which Lightning knows interactive shells
(alone, expected), (together, loss) = trained(1, "auto"), trained(2, GPPStrategy())
assert abs(loss - expected) <= 1e-12 * expected, (loss, expected)
for name, tensor in alone.items():
    torch.testing.assert_close(together[name], tensor, rtol=1e-9, atol=1e-10)
found = Trainer(strategy=GPPStrategy(), devices=2, **QUIET).validate(TwoTowers().double(), loader())
print("the same", sorted(found[0]))
"""


def test_several_processes_in_a_notebook() -> None:
    assert "the same ['val_acc', 'val_kept', 'val_loss']" in succeeded(start(["-c", TRAINING + IN_A_NOTEBOOK]))


FAULTS = """
import os
import time
from lightning.pytorch.callbacks import OnExceptionCheckpoint

class Failing(TwoTowers):
    fault = None
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.fault(self.global_rank)

def kill(module, rank):
    if rank == 1:
        os.kill(os.getpid(), 9)

def refuse(module, rank):
    raise ValueError("the fault of this test")

def wait(module, rank):
    print("waits" * (rank == 0), flush=True)
    time.sleep(60)

Failing.fault = {fault}
saving = OnExceptionCheckpoint("{folder}", filename="last")
QUIET["enable_checkpointing"] = True
trainer = Trainer(strategy=GPPStrategy(), devices=2, max_epochs=2, callbacks=[saving], **QUIET)
try:
    trainer.fit(Failing().double(), loader())
finally:
    print("callbacks", trainer.callbacks == [saving], trainer.global_step)
"""


def failing(fault: str, folder: Path) -> list[str]:
    return ["-c", TRAINING + FAULTS.format(fault=fault, folder=folder)]


@pytest.mark.acceptance
def test_a_killed_process_ends_the_others_and_the_call(tmp_path: Path) -> None:
    code, output = outcome(start(failing("kill", tmp_path)))
    assert code == 1
    assert "process 1 terminated with signal SIGKILL" in output
    assert "First cause: rank 1" in output


@pytest.mark.acceptance
def test_exceptions_are_handled_in_the_processes_and_once(tmp_path: Path) -> None:
    code, output = outcome(start(failing("refuse", tmp_path)))
    assert code == 1
    assert output.count("ValueError: the fault of this test") == 1
    assert "callbacks True 0" in output  # this process took no part in the run
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 1


@pytest.mark.acceptance
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_one_that_started_it(tmp_path: Path, number: int) -> None:
    program = start(failing("wait", tmp_path))
    assert "waits" in program.lines(PATIENCE)
    program.send_signal(number)
    code, output = outcome(program)  # comes when the last holder of the output has ended
    assert code == (130 if number == signal.SIGINT else -number)
    assert "was interrupted" in output
