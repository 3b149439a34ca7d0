"""Forked processes for Lightning's own tests, whose trainers have no script that further processes could run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

_PATIENCE: Final = 5.0
"""Seconds for each process to end by itself when the one that started it was interrupted."""


class ForkingLauncher(_MultiProcessingLauncher):
    """Forks processes in which a trainer handles exceptions as it does in those that run a script.

    Lightning handles them only in the process that started the others and takes no part in the run: the ranks would
    not hear of each other's exceptions, and callbacks would save the trainer as it was before the run.
    """

    inside = False
    """True in a process that was started: there Lightning has to know by the launcher that results go through a queue,
    in which predictions would not arrive.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run `function` in all processes, and return the result of rank 0. None of them outlives this call."""
        if self.inside:
            return function(*args, **kwargs)
        assert trainer is not None
        try:
            return super().launch(partial(_run, trainer), *args, trainer=trainer, **kwargs)
        except BaseException:
            self._end()
            _Handled.elsewhere(trainer)
            raise

    def _end(self) -> None:
        for number in (signal.SIGINT, signal.SIGKILL):
            self.kill(number)
            for process in self.procs:
                process.join(_PATIENCE)


def _run(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
    """Call the trainer's method anew, now in a process that was started."""
    launcher: Any = trainer.strategy.launcher
    launcher.inside = True
    assert trainer.state.fn is not None
    return getattr(trainer, trainer.state.fn.value)(*args, **kwargs)


class _Handled(pl.Callback):
    """Stands for a trainer's callbacks once, while the trainer passes on an exception that belongs to the processes."""

    def __init__(self, callbacks: list[pl.Callback]) -> None:
        self._callbacks = callbacks

    @classmethod
    def elsewhere(cls, trainer: pl.Trainer) -> None:
        trainer.callbacks = [cls(trainer.callbacks)]  # type: ignore[attr-defined]  # set by a connector

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        trainer.callbacks = self._callbacks  # type: ignore[attr-defined]
