"""All that surrounds the hooks of module and callbacks during a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import lightning.pytorch as pl
import torch

from lightning_gpp.strategy.hooks.optimizers import OptimizerHooks
from lightning_gpp.strategy.hooks.random_numbers import RandomHooks
from lightning_gpp.strategy.hooks.saving import SavingHooks
from lightning_gpp.strategy.hooks.shared import SharedHooks, SharedToggles
from lightning_gpp.strategy.steps import Steps
from lightning_gpp.training.control import Control
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.whole.mirror import Mirror


class _AroundHooks(Protocol):
    def attach(self) -> None:
        """Replace hooks by others, which call them."""

    def detach(self) -> None:
        """Put them back."""


class AttachedHooks:
    """Attaches the parts, each around those before it, and detaches them in the opposite order.

    Args:
        trainer: of the run.
        control: the side channel of this rank.
        device: the device of this rank.
        readers: give all ranks what hooks read of steps.
        steps: runs the steps.
        trained: returns the engine that trains.

    Attributes:
        attached: the parts that are attached.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        control: Control,
        device: torch.device,
        readers: _AroundHooks,
        steps: Steps,
        trained: Callable[[], Engine],
    ) -> None:
        module, self._control = trainer.lightning_module, control
        self._divided: list[_AroundHooks] = [
            readers,
            SavingHooks(trainer),
            RandomHooks(trainer, Mirror(control, device).one_stream),
            SharedHooks(module, control, steps),
        ]
        self._toggles = SharedToggles(module, lambda: trained().undivided_optimizers())
        self._training: list[_AroundHooks] = [OptimizerHooks(trainer, trained)]
        self.attached: list[_AroundHooks] = []

    def attach(self, *, trains: bool, whole: bool) -> None:
        """Attach what a run needs. `trains`: it trains. `whole`: the training step runs as a whole."""
        if self._control.num_devices > 1:
            self.attached += [*self._divided, *([self._toggles] if trains and whole else [])]
        if self._control.num_processes > 1 and trains:  # optimizers are divided over replicas, too
            self.attached += self._training
        for part in self.attached:
            part.attach()

    def detach(self) -> None:
        """Undo `attach`."""
        while self.attached:
            self.attached.pop().detach()
