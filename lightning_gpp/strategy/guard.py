"""The guard: replaces Lightning's reactions to failures and signals, which would wait for other ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Final

import lightning.pytorch as pl

from lightning_gpp._compat import lightning as _compat
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.failure.processes import exit_now, say
from lightning_gpp.failure.signals import STOP_SIGNALS, OneInterrupt, StopFlag
from lightning_gpp.replaced import Replaced
from lightning_gpp.strategy.preemption import SIGNALLED, Preempted, Preemption

_INTERRUPT_GRACE: Final = 2.0
"""Seconds for a main thread to raise KeyboardInterrupt; it cannot while it waits in a receive."""


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
    """

    def __init__(self, trainer: pl.Trainer, monitor: FailureMonitor, grace: timedelta) -> None:
        self._trainer, self._monitor, self._grace = trainer, monitor, grace.total_seconds()
        self._preemption: Preemption | None = None
        self._flag: StopFlag | None = None
        self._interrupts: OneInterrupt | None = None
        self._said: int | None = None
        self._raised = threading.Event()
        self._replaced = Replaced()
        trainer.callbacks = _Guarded(self, trainer.callbacks)  # type: ignore[attr-defined]  # set by a connector
        if threading.current_thread() is threading.main_thread():
            _compat.leave_signals_alone(trainer, self._replaced)
            self._flag = self._install(STOP_SIGNALS)
            self._interrupts = OneInterrupt() if callable(signal.getsignal(signal.SIGINT)) else None

    def _install(self, signals: tuple[signal.Signals, ...]) -> StopFlag:
        flag = StopFlag(self._give_up, signals=signals, patience=self._grace, heard=self._hear)
        return flag.__enter__()

    def stops_for(self, preemption: Preemption) -> None:
        """Let the run stop between two steps from now on, as there are processes that can agree on it."""
        self._preemption = preemption
        _compat.around_steps(
            self._trainer,
            self._replaced,
            before=self._before_step,
            after=self._after_step,
            rested=preemption.agree_to_finish,
        )

    def _after_step(self) -> None:
        """Take what rank 0 says: whether a rank was asked to stop, and whether the run should stop after this step."""
        if self._preemption is not None:
            self._said = self._preemption.said(self._received)

    def _before_step(self) -> None:
        """Stop here if rank 0 said so after the step before; at the first one it has to be asked."""
        said, self._said = self._said, None
        self.boundary(said=said)

    @property
    def _received(self) -> int:
        return 0 if self._flag is None else self._flag.received or 0

    def boundary(self, *, ended: bool = False, said: int | None = None) -> None:
        """Stop here if any rank was asked to. All ranks call this together.

        Args:
            ended: the run is complete, no step follows.
            said: the signal that rank 0 has told already, 0 if there is none.

        Raises:
            Preempted: on all ranks, after they saved.
        """
        preemption = self._preemption
        if preemption is None or not preemption.possible:
            return
        if said is None:
            said = preemption.asked(self._received, ended=ended)
        if not said:
            return
        number = signal.Signals(said)
        if self._flag is not None:
            self._flag.answer()
        preemption.save(number, ended=ended)
        self._hand_on(number)
        self._trainer.strategy.barrier()
        raise Preempted(number)

    def _hand_on(self, number: signal.Signals) -> None:
        """Call the handler that was there before the run, such as that of submitit, which requeues the job."""
        handler: Callable[..., Any] | None = None if self._flag is None else self._flag.handler_before(number)
        if handler is not None:
            try:
                handler(number, None)
            except SystemExit:  # other ranks are not ready yet
                return

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        """Between two steps of a validation the run can stop, too."""
        self.boundary()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

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
        if self._interrupts is not None:
            self._interrupts.remove()
        if self._flag is not None:
            self._flag.__exit__(None, error, None)
            self._flag = None

    # -- in the thread that hears of signals

    def _hear(self, number: int) -> None:
        if number in STOP_SIGNALS and self._preemption is None:
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

    def _give_up(self, number: signal.Signals) -> None:
        self._end(f"received {number.name}, and no step ended within {self._grace:g} s (strategy.grace)", number)

    def _end(self, event: str, number: signal.Signals) -> None:
        self._monitor.fail(event, code=SIGNALLED + number)
        exit_now(SIGNALLED + number)
