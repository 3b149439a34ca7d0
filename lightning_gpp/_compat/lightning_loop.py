"""Lightning's loop of automatic optimization, whose classes are private."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gpp.errors import ConfigError


class PipelinedClosure(Closure):
    """Runs once, and zeroes gradients before the step, which computes new ones.

    Args:
        plain: Lightning's own.
        zeroed: a context for the step.
    """

    calls = 0

    def __init__(self, plain: Closure, zeroed: AbstractContextManager[None]) -> None:
        super().__init__(plain._step_fn, plain._backward_fn, plain._zero_grad_fn)
        self._zeroed = zeroed

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        self.calls += 1
        if self.calls > 1:
            raise closure_repeated()
        with nullcontext() if self._zero_grad_fn is None else self._zeroed:
            output = self._step_fn()
        if self._backward_fn is not None and output.closure_loss is not None:
            self._backward_fn(output.closure_loss)
        return output


class PipelinedOptimization(_AutomaticOptimization):
    """The loop with such closures; a class of a module, so that trainers can be pickled."""

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        plain = super()._make_closure(kwargs, optimizer, batch_idx)
        return PipelinedClosure(plain, self._zeroed(optimizer, batch_idx))

    @contextmanager
    def _zeroed(self, optimizer: Any, batch_idx: int) -> Iterator[None]:
        """Zero the gradients; at the end, where Lightning would, call the hooks on those from before."""
        groups = optimizer.param_groups if self._is_watched() else []
        parameters = [parameter for group in groups for parameter in group["params"]]
        before, trainer = [parameter.grad for parameter in parameters], self.trainer
        call._call_lightning_module_hook(trainer, "optimizer_zero_grad", trainer.current_epoch, batch_idx, optimizer)
        yield
        after = [parameter.grad for parameter in parameters]
        _set_gradients(parameters, before)
        self._on_before_zero_grad(optimizer)
        self.optim_progress.optimizer.zero_grad.increment_completed()
        _set_gradients(parameters, after)

    def _is_watched(self) -> bool:
        """True if a hook is called before gradients are zeroed; otherwise those from before need no memory."""
        trainer: Any = self.trainer
        hook, callbacks = "on_before_zero_grad", trainer.callbacks
        by_callbacks = any(is_overridden(hook, callback, parent=Callback) for callback in callbacks)
        return by_callbacks or is_overridden(hook, trainer.lightning_module)


def _set_gradients(parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


class SkippingOptimization(_AutomaticOptimization):
    """The loop for steps that run on all ranks, with equal results: one that returns None is skipped everywhere.

    Lightning refuses that on several processes, because others could go on.
    """

    def _training_step(self, kwargs: Any) -> ClosureResult:
        trainer = self.trainer
        output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        return self.output_result_cls.from_training_step_output(output, trainer.accumulate_grad_batches)


def closure_repeated() -> Exception:
    """The error for optimizers that evaluate the model repeatedly."""
    return ConfigError(
        "The optimizer called its closure more than once in one step. Optimizers that evaluate the model repeatedly "
        "(L-BFGS, sharpness-aware minimisation) use norms over all parameters, of which every rank has only its own. "
        "Use one that needs a single evaluation, or take these steps by hand, in manual optimization, with "
        "self.trainer.strategy.grad_norm()."
    )
