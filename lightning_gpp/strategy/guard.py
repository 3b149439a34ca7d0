"""The guard: replaces Lightning's reactions to failures and signals, which would wait for other ranks.

A signal that asks a run to stop (preemption) lets all ranks save together between two steps, and end:

    signal, to any rank ─> flag ─> watch ─> rank 0 ─> all ranks, before the next step ─> save ─> requeue ─> exit code

It comes while its rank computes, waits in a receive or saves, and the ranks learn of it at different times. A handler
that saves waits for ranks that wait elsewhere, for ever. So nothing happens in a handler, and rank 0 alone decides
between which two steps all stop.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gpp._compat import lightning as _compat
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.failure.processes import exit_now, say
from lightning_gpp.failure.signals import STOP_SIGNALS, StopFlag
from lightning_gpp.replaced import Replaced
from lightning_gpp.strategy.optimization import accumulates
from lightning_gpp.training.control import Control

log = logging.getLogger(__name__)

SIGNALLED: Final = 128
"""A process that a signal has ended has this exit code plus the signal's number, as in shells."""
_FINISH: Final = 256
"""Added to a signal's number if the run should stop after this step as if `trainer.should_stop` were set everywhere."""
_INTERRUPT_GRACE: Final = 2.0
"""Seconds for a main thread to raise KeyboardInterrupt; it cannot while it waits in a receive."""


class Preempted(SystemExit):
    """All ranks have stopped together, because of a signal."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(SIGNALLED + number)
        self.number = number


class _Guarded(list[pl.Callback]):
    """The trainer's callbacks as users index and count them, with a guard before them where their hooks are called."""

    def __init__(self, guard: Guard, callbacks: Iterable[pl.Callback]) -> None:
        super().__init__(callbacks)
        self._guard = guard

    def __iter__(self) -> Iterator[pl.Callback]:
        yield self._guard
        yield from super().__iter__()


class Guard(pl.Callback):
    """Guards one run of a trainer, from the guard's creation, before the process group exists, to `remove`.

    * Exceptions are reported before other callbacks see them: a callback that saves a checkpoint would wait for ranks
      that wait for this one, and the failure would never be reported.
    * Signals that ask the job to stop set a flag, on which all ranks act between two steps.
    * Ctrl-C ends all ranks, also one that waits in a receive.

    Args:
        trainer: of the run.
        monitor: knows on rank 0 whether any rank was asked to stop.
        environment: may ask for SLURM jobs to be requeued.
        finish_saving: waits for a checkpoint that is being written in the background.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        monitor: FailureMonitor,
        environment: ClusterEnvironment,
        finish_saving: Callable[[], None],
    ) -> None:
        self._trainer, self._monitor, self._environment = trainer, monitor, environment
        self._finish_saving = finish_saving
        self._control: Control | None = None
        self._flag: StopFlag | None = None
        self._said: int | None = None
        self._wants_to_finish = self._validated = False
        self._raised = threading.Event()
        self._replaced = Replaced()
        trainer.callbacks = _Guarded(self, trainer.callbacks)  # type: ignore[attr-defined]  # set by a connector
        if threading.current_thread() is threading.main_thread():
            _compat.leave_signals_alone(trainer, self._replaced)
            self._flag = StopFlag(self._hear).__enter__()

    def stop_between_steps(self, control: Control) -> None:
        """Let the run stop between two steps from now on, as there are processes that can agree on it."""
        self._control = control
        _compat.around_steps(
            self._trainer,
            self._replaced,
            before=self._before_step,
            after=self._after_step,
            rested=self._agree_to_finish,
        )

    # -- between two steps

    @property
    def _wanted(self) -> int:
        """The signal that this rank knows of, 0 if there is none. The watch may not know yet of its own."""
        return self._monitor.stop_signal or (0 if self._flag is None else self._flag.received or 0)

    def _after_step(self) -> None:
        """Take what rank 0 says: whether a rank was asked to stop, and whether the run should stop after this step.

        `trainer.should_stop` of rank 0 counts, so that nobody has to wait for all others; another rank's is in force
        when all agree the next time.
        """
        if self._control is None:
            return
        wants = self._trainer.should_stop
        finishes, self._said = divmod(self._control.relay(self._wanted + _FINISH * wants), _FINISH)
        self._wants_to_finish = self._wants_to_finish or wants
        self._trainer.should_stop = bool(finishes)

    def _agree_to_finish(self) -> None:
        """Stop the run here if it should on any rank. All ranks call this together, when none has a step under way."""
        if self._control is not None:
            wants = self._trainer.should_stop or self._wants_to_finish
            self._trainer.should_stop = self._control.unanimous(wants, everyone=False)

    def _before_step(self) -> None:
        """Stop here if rank 0 said so after the step before; at the first one it has to be asked.

        Not behind a validation, in which the run could stop: from here Lightning would resume at its end.
        """
        said, self._said = self._said, None
        validated, self._validated = self._validated, False
        if not validated:
            self.boundary(said=said)

    def boundary(self, *, ended: bool = False, said: int | None = None) -> None:
        """Stop here if any rank was asked to, but not between the mini-batches of one optimizer step, whose gradients
        would be lost. All ranks call this together.

        Args:
            ended: the run is complete: no step follows at which rank 0 could know of a signal that another rank has
                received just now.
            said: the signal that rank 0 has told already, 0 if there is none.

        Raises:
            Preempted: on all ranks, after they saved.
        """
        control, trainer = self._control, self._trainer
        if control is None or (trainer.state.fn == TrainerFn.FITTING and accumulates(trainer)):
            return
        if said is None:
            mine = self._wanted
            said = next(filter(None, control.gather_all(mine)), 0) if ended else control.relay(mine)
        if not said:
            return
        number = signal.Signals(said)
        if self._flag is not None:
            self._flag.answer()
        self._save(control, number, ended)
        self._hand_on(number)
        trainer.strategy.barrier()
        raise Preempted(number)

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        """Between two steps of a validation the run can stop, too."""
        self.boundary()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_end(self, *_: Any, **__: Any) -> None:
        """Note that the next step follows a validation."""
        self._validated = True

    # -- the end

    def _save(self, control: Control, number: signal.Signals, ended: bool) -> None:
        """Save what the run has trained, and ask SLURM to start the job again."""
        path, environment = "", self._environment
        if self._trainer.state.fn == TrainerFn.FITTING and not self._trainer.sanity_checking:
            path = self._saved(control, ended)
        if not control.first:
            return
        slurm = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        requeues = slurm and environment.requeue_signal == number  # type: ignore[attr-defined]
        what = f"saved {path} after step {self._trainer.global_step}" if path else "nothing to save"
        next_step = f" To go on, start again with ckpt_path={path}." if path and not requeues else ""
        code = SIGNALLED + number
        say(f"[rank 0] Received {number.name}: {what}. All ranks end with exit code {code}.{next_step}")
        if requeues:
            requeue()

    def _saved(self, control: Control, ended: bool) -> str:
        path: str = control.broadcast(next_path(self._trainer.default_root_dir))
        counters: AbstractContextManager[None] = nullcontext()
        if not ended:
            counters = _compat.counters_to_resume_from(self._trainer)
        with counters:
            self._trainer.save_checkpoint(path)
        self._finish_saving()
        return path

    def _hand_on(self, number: signal.Signals) -> None:
        """Call the handler that was there before the run, such as that of submitit, which requeues the job."""
        handler: Callable[..., Any] | None = None if self._flag is None else self._flag.handler_before(number)
        if handler is not None:
            try:
                handler(number, None)
            except SystemExit:  # other ranks are not ready yet
                return

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let the strategy report the exception now; Lightning's later call of the strategy does nothing more."""
        self._raised.set()
        trainer.strategy.on_exception(exception)

    def remove(self, error: BaseException | None) -> None:
        """Restore Lightning's reactions. A signal after the last boundary takes effect now if there is no error."""
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callbacks, _Guarded):
            self._trainer.callbacks = callbacks[:]  # type: ignore[attr-defined]
        self._replaced.restore()
        if self._flag is not None:
            self._flag.__exit__(None, error, None)
            self._flag = None

    # -- in the thread that hears of signals

    def _hear(self, number: int) -> None:
        if number in STOP_SIGNALS and self._control is None:
            self._leave(signal.Signals(number))
        elif number in STOP_SIGNALS:
            self._monitor.ask_to_stop(number)
        elif number == signal.SIGINT:
            threading.Thread(target=self._interrupt, daemon=True).start()

    def _interrupt(self) -> None:
        if not self._raised.wait(_INTERRUPT_GRACE):
            self._end("was interrupted", signal.SIGINT)

    def _leave(self, number: signal.Signals) -> None:
        """End while the ranks find each other: there is nothing to save, and some may never come."""
        say(f"[rank {self._monitor.rank}] Received {number.name} before all ranks were there. It ends.")
        self._hand_on(number)
        self._end(f"received {number.name} before all ranks were there", number)

    def _end(self, event: str, number: signal.Signals) -> None:
        self._monitor.fail(event, code=SIGNALLED + number)
        exit_now(SIGNALLED + number)


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
