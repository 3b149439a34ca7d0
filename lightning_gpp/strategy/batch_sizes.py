"""Lightning's search for the largest batch size: all ranks learn when a mini-batch does not fit one of them.

A trial that fails raises an error on the rank whose memory is too small, while others wait for its tensors. So in these
trials each rank first runs its part of a mini-batch alone, and all raise the error if any rank does.
"""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.training.host import Job
from lightning_gpp.training.option_values import SYNCHRONOUS


def finds_sizes(trainer: pl.Trainer) -> bool:
    """True if a callback looks for the largest batch size."""
    return any(isinstance(callback, BatchSizeFinder) for callback in getattr(trainer, "callbacks", ()))


def check_loop(trainer: pl.Trainer, num_processes: int) -> None:
    """Raise ConfigError for a search in an evaluation on several processes."""
    loop = trainer.state.fn
    if num_processes > 1 and finds_sizes(trainer) and loop is not None and loop != TrainerFn.FITTING:
        raise _refusal(f"in trainer.{loop.value}")


def check_search(trainer: pl.Trainer, job: Job, plan: Plan) -> None:
    """Raise ConfigError if several processes could not agree on trials that fail."""
    if finds_sizes(trainer):
        for reason in _unsuited(job, plan):
            raise _refusal(reason)


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"The callback BatchSizeFinder runs trials that may fail on one device, and others would not notice {reason}. "
        "Remove it, and look at the memory of each device in gpp-plan (trainer.callbacks)."
    )


def _unsuited(job: Job, plan: Plan) -> Iterator[str]:
    if job.whole:
        yield "in a step as a whole (strategy.step=whole)"
    if job.options.weights != SYNCHRONOUS:
        yield f"without a flush (strategy.weights={job.options.weights})"
    if plan.sharding == "fsdp":
        yield "where parameters are divided (strategy.sharding=fsdp)"
    if any(edge.dynamic for edge in plan.edges):
        yield "where shapes of tensors between stages depend on the data"
