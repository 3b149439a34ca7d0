"""Lightning's loop of automatic optimization, whose classes are private."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer import call

from lightning_gpp.errors import ConfigError


class PipelinedClosure(Closure):
    """Zeroes gradients before the step, and runs once."""

    calls = 0

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        self.calls += 1
        if self.calls > 1:
            raise closure_repeated()
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        output = self._step_fn()
        if self._backward_fn is not None and output.closure_loss is not None:
            self._backward_fn(output.closure_loss)
        return output


class PipelinedOptimization(_AutomaticOptimization):
    """The loop with such closures; a class of a module, so that trainers can be pickled."""

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        plain = super()._make_closure(kwargs, optimizer, batch_idx)
        return PipelinedClosure(plain._step_fn, plain._backward_fn, plain._zero_grad_fn)


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
