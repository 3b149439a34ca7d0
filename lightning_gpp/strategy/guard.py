"""The failure guard: replaces Lightning's reactions to failures, which would wait for other ranks."""

from __future__ import annotations

import signal
import threading

import lightning.pytorch as pl

from lightning_gpp._compat.lightning import disable_sigterm_broadcast
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.failure.processes import exit_now
from lightning_gpp.failure.stop_flag import StopFlag


class FailureGuard(pl.Callback):
    """Guards one run of a trainer, from the guard's creation to `remove`.

    * Exceptions are reported before other callbacks see them: a callback that saves a checkpoint would wait for ranks
      that wait for this one, and the failure would never be reported.
    * SIGTERM to any rank ends all ranks; Lightning's handler would wait for a broadcast for ever.
    """

    def __init__(self, trainer: pl.Trainer, monitor: FailureMonitor) -> None:
        self._trainer = trainer
        self._monitor = monitor
        self._flag: StopFlag | None = None
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        callbacks.insert(0, self)
        if threading.current_thread() is threading.main_thread():
            disable_sigterm_broadcast(trainer)
            self._flag = StopFlag(self._terminate, signals=(signal.SIGTERM,), patience=0.0).__enter__()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let the strategy report the exception now; Lightning's later call of the strategy does nothing more."""
        trainer.strategy.on_exception(exception)

    def remove(self) -> None:
        """Restore Lightning's reactions."""
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        if self in callbacks:
            callbacks.remove(self)
        if self._flag is not None:
            self._flag.__exit__(None, None, None)
            self._flag = None

    def _terminate(self, number: signal.Signals) -> None:
        self._monitor.fail(f"received {number.name}")
        exit_now(128 + number)
