"""Preemption: a signal asks a run to stop; all ranks save together between two steps, and end.

    signal, to any rank ─> flag ─> watch ─> rank 0 ─> all ranks, before the next step ─> save ─> requeue ─> exit code

A signal comes while its rank computes, waits in a receive or saves, and the ranks learn of it at different times. A
handler that saves waits for ranks that wait elsewhere, for ever. So nothing happens in a handler, and rank 0 alone
decides between which two steps all stop.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gpp._compat import lightning as _compat
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.failure.processes import say
from lightning_gpp.strategy.optimization import accumulates
from lightning_gpp.training.control import Control

log = logging.getLogger(__name__)

SIGNALLED: Final = 128
"""A process that a signal has ended has this exit code plus the signal's number, as in shells."""


_FINISH: Final = 256
"""Added to a signal's number if the run should stop after this step as if `trainer.should_stop` were set everywhere."""


class Preempted(SystemExit):
    """All ranks have stopped together, because of a signal."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(SIGNALLED + number)
        self.number = number


class Preemption:
    """Stops a run of a trainer on all ranks at once.

    Args:
        trainer: of the run.
        control: of its ranks.
        monitor: knows on rank 0 whether any rank was asked to stop.
        environment: may ask for SLURM jobs to be requeued.
        finish_saving: waits for a checkpoint that is being written in the background.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        control: Control,
        monitor: FailureMonitor,
        environment: ClusterEnvironment,
        finish_saving: Callable[[], None],
    ) -> None:
        self._trainer, self._control, self._monitor, self._environment = trainer, control, monitor, environment
        self._finish_saving = finish_saving
        self._wants_to_finish = False

    def asked(self, received: int, *, ended: bool) -> int:
        """The signal for which all ranks stop now, 0 if there is none. All ranks call this together.

        Args:
            received: the signal of this rank, of which the watch may not know yet; 0 if there is none.
            ended: no step follows at which rank 0 could know of a signal that another rank has received just now.
        """
        mine = self._monitor.stop_signal or received
        return next(filter(None, self._control.gather_all(mine)), 0) if ended else self._control.relay(mine)

    def said(self, received: int) -> int:
        """Like `asked`, after a step of training; here ranks also agree whether the run should stop after it.

        `trainer.should_stop` of rank 0 counts, so that nobody has to wait for all others; another rank's is in force
        when all agree the next time.
        """
        trainer = self._trainer
        mine = (self._monitor.stop_signal or received) + _FINISH * trainer.should_stop
        finishes, number = divmod(self._control.relay(mine), _FINISH)
        self._wants_to_finish = self._wants_to_finish or trainer.should_stop
        trainer.should_stop = bool(finishes)
        return number

    def agree_to_finish(self) -> None:
        """Stop the run here if it should on any rank. All ranks call this together, when none has a step under way."""
        trainer = self._trainer
        wants = trainer.should_stop or self._wants_to_finish
        trainer.should_stop = self._control.unanimous(wants, everyone=False)

    @property
    def possible(self) -> bool:
        """False between the mini-batches of one optimizer step: their gradients would be lost."""
        return self._trainer.state.fn != TrainerFn.FITTING or not accumulates(self._trainer)

    def save(self, number: signal.Signals, *, ended: bool) -> None:
        """Save what the run has trained, and ask SLURM to start the job again. All ranks call this together.

        `ended`: no step follows.
        """
        trains = self._trainer.state.fn == TrainerFn.FITTING and not self._trainer.sanity_checking
        path = self._save(ended) if trains else ""
        if self._control.first:
            what = f"saved {path} after step {self._trainer.global_step}" if path else "nothing to save"
            requeues = self._requeues(number)
            next_step = f" To go on, start again with ckpt_path={path}." if path and not requeues else ""
            code = SIGNALLED + number
            say(f"[rank 0] Received {number.name}: {what}. All ranks end with exit code {code}.{next_step}")
            if requeues:
                requeue()

    def _save(self, ended: bool) -> str:
        path: str = self._control.broadcast(next_path(self._trainer.default_root_dir))
        counters: AbstractContextManager[None] = nullcontext()
        if not ended:
            counters = _compat.counters_to_resume_from(self._trainer)
        with counters:
            self._trainer.save_checkpoint(path)
        self._finish_saving()
        return path

    def _requeues(self, number: signal.Signals) -> bool:
        environment = self._environment
        return (
            isinstance(environment, SLURMEnvironment)
            and environment.auto_requeue
            and environment.requeue_signal == number
        )


def next_path(folder: str) -> str:
    """The path of the next checkpoint of a run that is preempted, which Lightning resumes from in a SLURM job."""
    names = (name.rpartition("hpc_ckpt_")[2] for name in get_filesystem(folder).glob(f"{folder}/hpc_ckpt_*.ckpt"))
    numbers = [int(name.removesuffix(".ckpt")) for name in names if name.removesuffix(".ckpt").isdigit()]
    return f"{folder}/hpc_ckpt_{max(numbers, default=0) + 1}.ckpt"


def requeue() -> None:
    """Ask SLURM to start this job again; it ends the present one."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or error
        log.warning("scontrol requeue %s failed (%s); submit the job again to go on.", job, str(reason).strip())
