"""Lightning's loop of optimization: the gradients of a step survive its zeroing, and captures change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_gpp.errors import ConfigError

SKIPPED: Final = object()
"""Stands for the None that a step returns on all ranks; Lightning refuses it, because other ranks could go on."""


class SharedResult(ClosureResult):
    """The result of a step that all ranks run alike, and skip together."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        """The result that Lightning makes of it."""
        known = None if training_step_output is SKIPPED else training_step_output
        return super().from_training_step_output(known, normalize)


def accumulates(trainer: pl.Trainer) -> bool:
    """True between the mini-batches of one optimizer step, whose gradients no checkpoint has."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    ready = progress.current.ready
    return bool(ready % trainer.accumulate_grad_batches) and not (
        progress.is_last_batch or ready == trainer.num_training_batches
    )


def once(closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure, which raises ConfigError when it is called again."""
    calls = 0

    def called() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ConfigError(
                "The optimizer called its closure more than once in one step. Optimizers that evaluate the model "
                "repeatedly (L-BFGS, sharpness-aware minimisation) use norms over all parameters, of which every rank "
                "has only its own. Use one that needs a single evaluation, or take these steps by hand, in manual "
                "optimization, with self.trainer.strategy.grad_norm()."
            )
        return closure()

    return called


class StepGradients:
    """Puts the gradients that a pipelined step computes aside until the backward that Lightning calls.

    Between the two Lightning zeroes the gradients from before, and calls the hooks on them.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._seen: bool | None = None
        self._aside: list[tuple[Tensor, Tensor | None]] = []

    @contextmanager
    def computed(self) -> Iterator[None]:
        """Inside, a step computes gradients; those of several mini-batches of an optimizer step are summed."""
        trainer = self._trainer
        if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches:
            yield
            return
        parameters = [each for group in trainer.optimizers[0].param_groups for each in group["params"]]
        self._seen = self._are_seen() if self._seen is None else self._seen
        before = [parameter.grad if self._seen else None for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        yield
        self._aside = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient

    def _are_seen(self) -> bool:
        """True if a hook finds the gradients that are zeroed; otherwise those from before need no memory."""
        module: Any = self._trainer.lightning_module
        callbacks: Any = self._trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        by_callbacks = any(is_overridden("on_before_zero_grad", each, parent=pl.Callback) for each in callbacks)
        hooks = "on_before_zero_grad", "optimizer_zero_grad"
        return by_callbacks or any(is_overridden(name, module) for name in hooks)

    def give_back(self) -> None:
        """Let the parameters have the gradients of the step.

        Raises:
            ConfigError: a hook of the module has not zeroed the others.
        """
        for parameter, gradient in self._aside:
            if parameter.grad is not None and not parameter.is_meta and bool(parameter.grad.any()):
                raise ConfigError(
                    f"{type(self._trainer.lightning_module).__name__}.optimizer_zero_grad has left gradients, to which "
                    "those of the next mini-batch would be added. Zero all of them, and sum over mini-batches by "
                    "trainer.accumulate_grad_batches."
                )
            if gradient is not None:
                parameter.grad = gradient
        self._aside = []


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
