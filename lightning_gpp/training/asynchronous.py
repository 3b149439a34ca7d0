"""Asynchronous training: drives a pipeline that does not flush between mini-batches, and its weight policy.

Inside a segment every rank works on several mini-batches, and steps its optimizers whenever its own part of one is
complete. No rank waits for a rank that is behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_gpp._compat.torch import kept_version_counters
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.weights import WeightPolicy, Weights
from lightning_gpp.schedules import Program, compile_program
from lightning_gpp.schedules.continuous import continuous_program, delays_of
from lightning_gpp.training.data.batches import Facts, Segments, flushed_if_need_be
from lightning_gpp.training.host import Job


class Asynchronous:
    """Owns the weight policy of a rank, and the segments of the run. All ranks call its methods in the same order.

    Args:
        job: the job of the run.
        policy: policy for the weights with which actions compute, of the same optimizers.
        plan: the plan of training.
        optimizers: optimizers of this rank.
        num_steps: number of mini-batches that were trained earlier.

    Attributes:
        policy: see above.
        ahead: number of mini-batches that have to be known before their turn.
    """

    def __init__(
        self,
        job: Job,
        policy: WeightPolicy,
        plan: Plan,
        *,
        optimizers: Sequence[Optimizer],
        num_steps: int,
    ) -> None:
        self._options, self._optimizers, self._plan = job.options, optimizers, plan
        self._written = [p for p in job.module.parameters() if not p.is_meta]  # also by other ranks' steps (zero1)
        self._num_pipelines, self.policy = job.control.num_pipelines, policy
        self._programs: list[tuple[Plan, int, Program]] = []
        program = self.program(plan, plan.batch_size)
        self.ahead, self._apart = program.lead, max(delays_of(program).values(), default=0)
        self._segments = Segments(num_steps)
        self._since_update, self._accumulated = 0, 1
        self._preserved: list[AbstractContextManager[None]] = []
        before = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]
        after = [optimizer.register_step_post_hook(self._after_step) for optimizer in optimizers]
        self._hooks = [*before, *after]

    def program(self, plan: Plan, batch_size: int) -> Program:
        """The program of a mini-batch, without a flush if mini-batches of this size allow that."""
        for known, size, program in self._programs:
            if (known, size) == (plan, batch_size):
                return program
        self._programs.append((plan, batch_size, self._made(plan, batch_size)))
        return self._programs[-1][2]

    def _made(self, plan: Plan, batch_size: int) -> Program:
        return flushed_if_need_be(
            batch_size == self._plan.batch_size,
            partial(self._continuous, plan, batch_size),
            partial(compile_program, plan, batch_size, copies=self._num_pipelines),
        )

    def _continuous(self, plan: Plan, batch_size: int) -> Program:
        program = continuous_program(plan, batch_size, num_pipelines=self._num_pipelines)
        if batch_size != self._plan.batch_size:  # fewer micro-batches may be further ahead than the policy allows
            for delay in delays_of(program).values():
                self.policy.copies(delay)
        return program

    # -- segments -----------------------------------------------------------------------------------------------------

    def enter(
        self, step: int, facts: Sequence[Facts], lead: int, accumulated: int, weights: Callable[[], Weights]
    ) -> range:
        """Enter mini-batch `step`; returns its segment, as far as it is known.

        Args:
            step: number of the mini-batch.
            facts: facts about this mini-batch and those that follow.
            lead: number of mini-batches by which the program is ahead.
            accumulated: mini-batches per optimizer step.
            weights: returns the weights of the program.
        """
        begins = self._segments.begins_at(step)
        segment = self._segments.enter(step, facts, self._until_flush(step, lead))
        if begins:
            self._begin(segment.start, accumulated, weights())
        self._since_update, self._accumulated = self._since_update + 1, accumulated
        return segment

    def _until_flush(self, step: int, lead: int) -> int | None:
        """Number of mini-batches until the next flush that the options want; unknown ones cannot be ahead."""
        if step < self._options.synchronous_steps or lead > self.ahead:
            return 1
        every = self._options.flush_every
        return None if every is None else every - step % every

    def _begin(self, first: int, accumulated: int, weights: Weights) -> None:
        done, since = self.policy.updates, self._since_update
        synchronous = first < self._options.synchronous_steps or self._options.flush_every == 1
        self.policy.weights = replace(
            weights,
            delays={} if synchronous else weights.delays,
            accumulated=accumulated,
        )
        self.policy.begin(lambda batch: done + (batch - first + since) // accumulated, first)

    @property
    def age(self) -> int:
        """The most optimizer steps by which ranks are apart; 0 if the pipeline flushes after the mini-batch."""
        return -(-self._apart // self._accumulated) if len(self._segments.current) > 1 else 0

    def on_their_way(self, step: int, lead: int) -> range:
        """The mini-batches that any device has started, if `step` is the next one."""
        return self._segments.on_their_way(step, lead)

    def empty(self, step: int) -> None:
        """Note that the mini-batches in the pipeline were dropped; the next one is `step`."""
        self._segments = Segments(step)
        self.policy.empty()

    # -- updates ------------------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Prepare for an optimizer step, whose gradients are complete."""
        self.policy.before_update()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        context = kept_version_counters({*self._written, *_parameters([optimizer])})
        context.__enter__()
        self._preserved.append(context)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._preserved.pop().__exit__(None, None, None)
        if optimizer is self._optimizers[-1]:
            self.policy.after_update()
            self._since_update = 0

    def release(self) -> None:
        """Detach from the optimizers."""
        for hook in self._hooks:
            hook.remove()

    # -- state --------------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Facts of the policy that all ranks know alike."""
        return {
            "policy": self._options.weights,
            "options": dict(self._options.weight_options or {}),
            "updates": self.policy.updates,
        }

    def take(self, facts: Mapping[str, Any], values: Mapping[str, Mapping[Parameter, Tensor]]) -> None:
        """Resume from the facts of an earlier run, and the values that its policy saved.

        Under another policy the run begins as after synchronous training.
        """
        own = self.facts()
        if any(facts[key] != own[key] for key in ("policy", "options")):
            return
        self.policy.updates = facts["updates"]
        self.policy.restore(values)


def _parameters(optimizers: Iterable[Optimizer]) -> list[Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
