"""The module's hooks around batches and at the end of epochs, which may read attributes that the step set.

They run on every rank, because they may change the module (a temperature, a frozen layer). Their logs count only where
the step runs; the other ranks replay them. If a hook fails only on ranks that have no results of the step, the outcome
on the step's rank counts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import lightning.pytorch as pl

from lightning_gpp.strategy.logs import LogRecorder
from lightning_gpp.strategy.steps import Steps
from lightning_gpp.training.control import Control

log = logging.getLogger(__name__)

NAMES = (
    *(f"on_{mode}_batch_{when}" for mode in ("train", "validation", "test", "predict") for when in ("start", "end")),
    *(f"on_{mode}_epoch_end" for mode in ("train", "validation", "test", "predict")),
)


class SharedHooks:
    """Replaces the hooks that a module overrides; `detach` puts them back."""

    def __init__(self, module: pl.LightningModule, control: Control, steps: Steps) -> None:
        self.module, self.control, self.steps = module, control, steps
        self._warned: set[str] = set()
        self._attached: list[str] = []

    def attach(self) -> None:
        for name in NAMES:
            plain = getattr(self.module, name)
            if getattr(plain, "__func__", None) is not getattr(pl.LightningModule, name):
                object.__setattr__(self.module, name, self._shared(name, plain))
                self._attached.append(name)

    def detach(self) -> None:
        for name in self._attached:
            vars(self.module).pop(name, None)
        self._attached = []

    def _shared(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        recorder, logs = LogRecorder(self.module, self.steps.host.user_code), self.steps.logs

        @functools.wraps(plain)
        def hook(*args: Any, **kwargs: Any) -> Any:
            recorder.reset()
            result, error = None, None
            try:
                with recorder.run(1 if name.endswith("epoch_end") else self.steps.incoming.batch_size):
                    result = plain(*args, **kwargs)
            except Exception as raised:
                error = raised
            facts = float(result == -1), float(self.module.trainer.should_stop), float(error is not None)
            calls, values = logs.exchange(recorder if self.control.runs_step else None, facts)
            self._raise(name, error, everywhere=bool(values[2]))
            logs.replay(self.module, calls, values[3:])
            if values[1]:
                self.module.trainer.should_stop = True
            return -1 if values[0] else None

        return hook

    def _raise(self, name: str, error: Exception | None, *, everywhere: bool) -> None:
        """Raise a hook's error, unless it only follows from missing results of the step. `everywhere`: they are there,
        and the hook failed where they are, too.
        """
        if error is None:
            return
        if everywhere or not isinstance(error, _FOLLOWING):
            raise error
        self._explain(name, error)

    def _explain(self, name: str, error: Exception) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        log.warning(
            "%s.%s raised %r on rank %d, and not on rank %d. Only the latter runs the step, so attributes that the "
            "hook reads may exist only there. The hook's values are taken from there; its other effects are missing "
            "here.",
            type(self.module).__name__,
            name,
            error,
            self.control.mesh.own_process,
            self.control.mesh.process(self.control.step_rank),
        )


_FOLLOWING: Final = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)
"""Errors that may follow from missing results: a full disk, or an assertion, does not."""


class SharedToggles:
    """Replaces the methods that freeze all parameters but those of one optimizer: on every rank they treat all ranks'.

    Whether a parameter needs a gradient is part of what all ranks must know alike of a network call, and the optimizers
    of a rank have only its own parameters.
    """

    names = "toggle_optimizer", "untoggle_optimizer"

    def __init__(self, module: pl.LightningModule, undivided: Callable[[], AbstractContextManager[None]]) -> None:
        self._module, self._undivided = module, undivided

    def attach(self) -> None:
        for name in self.names:
            object.__setattr__(self._module, name, self._shared(getattr(self._module, name)))

    def detach(self) -> None:
        for name in self.names:
            vars(self._module).pop(name, None)

    def _shared(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def method(*args: Any, **kwargs: Any) -> Any:
            with self._undivided():
                return plain(*args, **kwargs)

        return method
