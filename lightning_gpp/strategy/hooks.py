"""Surroundings of the hooks of module and callbacks during a run, so that they may run on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final

import lightning.pytorch as pl
import torch

from lightning_gpp.errors import ForeignTensorError
from lightning_gpp.replaced import Replaced
from lightning_gpp.strategy.batch_readers import GRADIENTS, owners_of, user_hooks
from lightning_gpp.strategy.logs import LogRecorder, exchange, replay
from lightning_gpp.strategy.optimization import accumulates
from lightning_gpp.strategy.steps import Steps
from lightning_gpp.training.control import Control, Mirror
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.tensors.foreign import known

LOOPS: Final = ("train", "validation", "test", "predict")
_OUTSIDE: Final = (
    *("on_fit_start", "on_fit_end"),
    *(f"on_{loop}_{moment}" for loop in LOOPS for moment in ("start", "end", "epoch_start", "epoch_end")),
)
"""Hooks outside of mini-batches: ranks draw the same random numbers, and so take the same decisions."""
_SHARED: Final = (
    *(f"on_{loop}_batch_{when}" for loop in LOOPS for when in ("start", "end")),
    *(f"on_{loop}_epoch_end" for loop in LOOPS),
)
"""Hooks of the module that may log what the step set: logs and wishes to stop count where the step runs."""


class Hooks:
    """Surrounds hooks during a run.

    Args:
        trainer: of the run.
        control: the side channel of this rank.
        device: the device of this rank.
        steps: runs the steps.
        trained: returns the engine that trains.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        control: Control,
        device: torch.device,
        steps: Steps,
        trained: Callable[[], Engine],
    ) -> None:
        self._trainer, self._control, self._steps, self._trained = trainer, control, steps, trained
        self._module: pl.LightningModule = trainer.lightning_module
        self._mirror = Mirror(control, device)
        self._replaced, self._saving = Replaced(), Replaced()

    def attach(self, *, trains: bool, whole: bool) -> None:
        """Surround what a run needs. `trains`: it trains. `whole`: the training step runs as a whole."""
        if self._control.num_devices > 1:
            self._throw_away(self._replaced)
            for found in user_hooks(self._trainer, _OUTSIDE):
                self._replaced.surround(found.owner, found.name, self._mirror.one_stream)
            self._share_logs()
            if (
                trains and whole
            ):  # whether a parameter needs a gradient is part of what all ranks know of a network call
                for name in ("toggle_optimizer", "untoggle_optimizer"):
                    self._replaced.surround(self._module, name, lambda: self._trained().undivided_optimizers())
        if self._control.num_processes > 1 and trains:  # optimizers are divided over replicas, too
            self._complete_optimizers()

    def detach(self) -> None:
        """Undo it."""
        self._replaced.restore()

    def begin_saving(self) -> None:
        """Begin a checkpoint, whose hooks run on all ranks, also after the run, when rank 0 has the whole module."""
        self.end_saving()
        if self._control.num_devices > 1 and not self._replaced:
            self._throw_away(self._saving)

    def end_saving(self) -> None:
        """End it, after the hooks."""
        self._saving.restore()

    def _throw_away(self, replaced: Replaced) -> None:
        """Let `on_save_checkpoint` end early on ranks whose checkpoint is thrown away, if it reads values of others."""
        if not self._trainer.is_global_zero:
            for found in user_hooks(self._trainer, ["on_save_checkpoint"]):
                replaced.surround(found.owner, found.name, partial(suppress, ForeignTensorError))

    # -- gradients and optimizers

    def _complete_optimizers(self) -> None:
        """In hooks around gradients optimizers have the parameters of all ranks, and norms are those of all."""
        for name in GRADIENTS:  # of libraries, too
            empty = [getattr(base, name, None) for base in (pl.Callback, pl.LightningModule)]
            for owner in owners_of(self._trainer):
                plain = getattr(owner, name, None)
                if plain is not None and getattr(plain, "__func__", None) not in empty:
                    self._replaced.surround(owner, name, self._with_norms)

    @contextmanager
    def _with_norms(self) -> Iterator[None]:
        norms = None if accumulates(self._trainer) else self._trained().known_norms()
        with self._trained().undivided_optimizers(), nullcontext() if norms is None else known(norms):
            yield

    # -- logs

    def _share_logs(self) -> None:
        """Let the module's hooks log on every rank what they log where the step runs."""
        for name in _SHARED:
            plain = getattr(self._module, name)
            if getattr(plain, "__func__", None) is not getattr(pl.LightningModule, name):
                self._replaced.put(self._module, name, self._shared(name, plain))

    def _shared(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        recorder = LogRecorder(self._module)

        @functools.wraps(plain)
        def hook(*args: Any, **kwargs: Any) -> Any:
            recorder.reset()
            with recorder.run(1 if name.endswith("epoch_end") else self._steps.incoming.batch_size):
                result = plain(*args, **kwargs)
            facts = result == -1, self._trainer.should_stop
            calls, _, (ends, stop) = exchange(self._control, recorder if self._control.runs_step else None, facts)
            replay(self._module, calls, self._steps.device)
            self._trainer.should_stop = self._trainer.should_stop or stop
            return -1 if ends else None

        return hook
