"""The module's hooks around batches and at the end of epochs, which may read attributes that the step set.

They run on every rank, because they may change the module (a temperature, a frozen layer). Their logs count only where
the step runs; the other ranks replay them. An error of any rank ends the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl

from lightning_gpp.strategy.logs import LogRecorder
from lightning_gpp.strategy.steps import Steps
from lightning_gpp.training.control import Control

NAMES = (
    *(f"on_{mode}_batch_{when}" for mode in ("train", "validation", "test", "predict") for when in ("start", "end")),
    *(f"on_{mode}_epoch_end" for mode in ("train", "validation", "test", "predict")),
)


class SharedHooks:
    """Replaces the hooks that a module overrides; `detach` puts them back."""

    def __init__(self, module: pl.LightningModule, control: Control, steps: Steps) -> None:
        self.module, self.control, self.steps = module, control, steps
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
        recorder, logs = LogRecorder(self.module), self.steps.logs

        @functools.wraps(plain)
        def hook(*args: Any, **kwargs: Any) -> Any:
            recorder.reset()
            with recorder.run(1 if name.endswith("epoch_end") else self.steps.incoming.batch_size):
                result = plain(*args, **kwargs)
            facts = float(result == -1), float(self.module.trainer.should_stop)
            calls, values = logs.exchange(recorder if self.control.runs_step else None, facts)
            logs.replay(self.module, calls, values[2:])
            if values[1]:
                self.module.trainer.should_stop = True
            return -1 if values[0] else None

        return hook


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
