"""Lightning's loop of automatic optimization, whose class is private."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer import call


class SkippingOptimization(_AutomaticOptimization):
    """The loop for steps that run on all ranks, with equal results: one that returns None is skipped everywhere.

    Lightning refuses that on several processes, because others could go on.
    """

    def _training_step(self, kwargs: Any) -> ClosureResult:
        trainer = self.trainer
        output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        return self.output_result_cls.from_training_step_output(output, trainer.accumulate_grad_batches)


def install_skipping(trainer: Any) -> None:
    """Let all ranks skip steps together."""
    epoch_loop = trainer.fit_loop.epoch_loop
    plain, loop = epoch_loop.automatic_optimization, SkippingOptimization(trainer)
    loop.optim_progress, loop._skip_backward = plain.optim_progress, plain._skip_backward
    epoch_loop.automatic_optimization = loop
