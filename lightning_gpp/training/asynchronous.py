"""Asynchronous training: a pipeline that does not flush between mini-batches, and the weights that it computes with.

Mini-batches of one form that follow each other are a *segment*: at its first one the pipeline fills, at its last one it
is empty again. In between every rank works on several mini-batches, and steps its optimizers whenever its own part of
one is complete. No rank waits for one that is behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_gpp._compat.torch import kept_version_counters
from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.weights import Counting, Weights, make_policy
from lightning_gpp.schedules import Program, compile_program
from lightning_gpp.schedules.continuous import continuous_program
from lightning_gpp.schedules.delayed import on_one_device
from lightning_gpp.training.options import Options

_PREFIX: Final = "gpp."
_UPDATES: Final = "gpp.updates"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a mini-batch that all ranks know: its samples, and a fingerprint of its form."""

    batch_size: int
    form: int


class Asynchronous:
    """Owns the weight policy of a rank, and the segments of the run. All ranks call its methods in the same order.

    Args:
        options: of the run.
        plan: of training.
        optimizers: of this rank.
        num_steps: mini-batches that were trained earlier.

    Attributes:
        policy: with which weights actions compute.
        ahead: mini-batches that have to be known before their turn.
    """

    def __init__(self, options: Options, plan: Plan, optimizers: Sequence[Optimizer], num_steps: int) -> None:
        self._options, self._optimizers, self._plan = options, optimizers, plan
        self.ahead = self.program(plan, plan.batch_size, 1).lead
        self.policy: Counting = make_policy(
            options.weights, Weights(parameters={}, optimizers=lambda: optimizers), **dict(options.weight_options or {})
        )
        self._segment = range(num_steps, num_steps)
        self._since_update = 0
        self._preserved: list[AbstractContextManager[None]] = []
        before = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]
        after = [optimizer.register_step_post_hook(self._after_step) for optimizer in optimizers]
        self._hooks = [*before, *after]

    def program(self, plan: Plan, batch_size: int, num_pipelines: int) -> Program:
        """The program of a mini-batch, without a flush where mini-batches of this size allow that."""
        plan = self._spread(plan) if self._options.delayed_devices else plan
        try:
            program = continuous_program(plan, batch_size, num_pipelines=num_pipelines)
        except ScheduleError:
            if batch_size == plan.batch_size:
                raise
            program = compile_program(plan, batch_size, copies=num_pipelines)
        return on_one_device(program) if self._options.delayed_devices else program

    def _spread(self, plan: Plan) -> Plan:
        """The plan's stages on the devices of the pipeline whose delays one device has."""
        where = {stage.name: stage for stage in self._plan.stages}
        stages = tuple(
            replace(
                stage,
                devices=where[stage.name].devices,
                micro_batch_size=where[stage.name].micro_batch_size,
                round_robin=where[stage.name].round_robin,
            )
            for stage in plan.stages
        )
        return replace(plan, stages=stages)

    # -- segments -----------------------------------------------------------------------------------------------------

    def enter(
        self, step: int, facts: Sequence[Facts], lead: int, accumulated: int, weights: Callable[[], Weights]
    ) -> range:
        """The segment of mini-batch `step`, as far as it is known.

        Args:
            step: number of the mini-batch.
            facts: of this mini-batch and those that follow.
            lead: mini-batches by which the program is ahead.
            accumulated: mini-batches per optimizer step.
            weights: makes those of the program.
        """
        begins = step >= self._segment.stop
        first = step if begins else self._segment.start
        self._segment = range(first, self._last(step, facts, lead))
        if begins:
            self._begin(first, accumulated, weights())
        self._since_update += 1
        return self._segment

    def _last(self, step: int, facts: Sequence[Facts], lead: int) -> int:
        if step < self._options.synchronous_steps or lead > self.ahead:
            return step + 1
        alike = next((i for i, other in enumerate(facts) if other != facts[0]), len(facts))
        every = self._options.flush_every
        until_flush = alike if every is None else every - step % every
        return step + min(alike, until_flush)

    def _begin(self, first: int, accumulated: int, weights: Weights) -> None:
        done, since = self.policy.updates, self._since_update
        self.policy.weights = weights
        self.policy.begin(lambda batch: done + (batch - first + since) // accumulated, first)

    # -- updates ------------------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """The gradients of an optimizer step are complete, and it follows."""
        self.policy.before_update()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        context = kept_version_counters(_parameters([optimizer]))
        context.__enter__()
        self._preserved.append(context)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._preserved.pop().__exit__(None, None, None)
        if optimizer is self._optimizers[-1]:
            self.policy.after_update()
            self._since_update = 0

    def release(self) -> None:
        """Leave the optimizers alone."""
        for hook in self._hooks:
            hook.remove()

    # -- state --------------------------------------------------------------------------------------------------------

    @contextmanager
    def in_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the state of the optimizer holds what the policy keeps for each parameter, as it holds momentum. So
        it is saved, and divided among other ranks, in the same way."""
        entries = {f"{_PREFIX}{name}": values for name, values in self.policy.saved().items()}
        touched = [p for p in _parameters([optimizer]) if p in optimizer.state]
        for parameter in touched:
            state = optimizer.state[parameter]
            state[_UPDATES] = self.policy.updates
            state.update({name: values[parameter] for name, values in entries.items() if parameter in values})
        try:
            yield
        finally:
            for parameter in touched:
                _taken(optimizer.state[parameter])

    def take_from(self, optimizer: Optimizer) -> None:
        """Go on from a state of the optimizer that was saved inside `in_optimizer`."""
        found: dict[str, dict[Parameter, Tensor]] = {}
        for parameter in _parameters([optimizer]):
            for name, value in _taken(optimizer.state.get(parameter, {})).items():
                if name == _UPDATES:
                    self.policy.updates = int(value)
                else:
                    found.setdefault(name.removeprefix(_PREFIX), {})[parameter] = value
        self.policy.restore(found)


def _taken(state: dict[str, Any]) -> dict[str, Any]:
    """The entries of the policy, which are removed."""
    return {name: state.pop(name) for name in list(state) if isinstance(name, str) and name.startswith(_PREFIX)}


def _parameters(optimizers: Iterable[Optimizer]) -> list[Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def later(arguments: Sequence[Any], number: int) -> list[Any]:
    """The arguments of the user's step, without the mini-batch, for one that comes `number` mini-batches later."""
    rest = list(arguments)
    if number and rest and isinstance(rest[0], int):
        rest[0] += number  # batch_idx
    return rest
