"""Lightning's loop of optimization: its accumulation, and captures that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn


def accumulates(trainer: pl.Trainer) -> bool:
    """True between the mini-batches of one optimizer step, whose gradients no checkpoint has."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    ready = progress.current.ready
    return bool(ready % trainer.accumulate_grad_batches) and not (
        progress.is_last_batch or ready == trainer.num_training_batches
    )


class Still:
    """Replaces an optimizer or scheduler while the step runs on fake tensors, to find its network calls.

    Nothing changes; all else is answered by the real one.

    Args:
        real: the optimizer or scheduler.
        parameters: those that the step sees instead of the real ones, by their identity.
    """

    def __init__(self, real: Any, parameters: Mapping[int, Tensor]) -> None:
        self._real, self._parameters = real, parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Copies of the groups, which the step may change, with the parameters that it sees."""
        seen = [[self._parameters.get(id(each), each) for each in group["params"]] for group in self._real.param_groups]
        return [
            {**group, "params": parameters} for group, parameters in zip(self._real.param_groups, seen, strict=True)
        ]

    def step(self, *args: Any, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        """Run the closure, which calls networks, and change nothing."""
        called = closure or next((each for each in args if callable(each)), None)
        return None if called is None else called()

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def toggle_model(self, *_: Any, **__: Any) -> Any:
        """A context that changes nothing."""
        return nullcontext()


def stand_ins(module: pl.LightningModule, copied: nn.Module) -> dict[str, Any]:
    """The methods of manual optimization, without effect, for a copy of the module."""
    seen = dict(copied.named_parameters(remove_duplicate=False))
    parameters = {id(each): seen[name] for name, each in module.named_parameters() if name in seen}
    optimizers = [Still(optimizer, parameters) for optimizer in module.trainer.optimizers]
    schedulers = [Still(config.scheduler, parameters) for config in module.trainer.lr_scheduler_configs]
    names = ("manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients", "lr_scheduler_step")
    return {
        **dict.fromkeys(names, _nothing),
        "toggled_optimizer": lambda *_, **__: nullcontext(),
        "optimizers": lambda use_pl_optimizer=True: _one_or_all(optimizers),
        "lr_schedulers": lambda: _one_or_all(schedulers) if schedulers else None,
    }


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces methods that change gradients, parameters or schedules."""


def _one_or_all(items: Sequence[Still]) -> Any:
    return items[0] if len(items) == 1 else list(items)
