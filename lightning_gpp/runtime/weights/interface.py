"""Weight policies: choose the values of its parameters with which a stage computes, if the pipeline does not flush.

*Version* v of the weights are their values after v optimizer steps. A policy chooses the version, or other values, for
each forward and backward, and keeps the copies that this takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


class Use(NamedTuple):
    """A computation of a stage with its weights, for one micro-batch.

    `final`: it is the last one for this micro-batch.
    """

    stage: int
    mini_batch: int
    micro_batch: int
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one device.

    Args:
        parameters: trained parameters of each of its stages.
        micro_batches: micro-batches of each of its stages per mini-batch, on this device.
        lead: the most mini-batches by which any device of the pipeline is ahead.
        entry: mini-batches by which the stage is ahead that first read a micro-batch, by stage and micro-batch.
        delays: mini-batches between a forward and its backward in the steady state, by stage of the plan; none where
            the pipeline always flushes.
        accumulated: mini-batches per update.
        elsewhere: stages on other devices that use a parameter, too.
        optimizers: returns the device's optimizers.
    """

    parameters: Mapping[int, Sequence[Parameter]]
    micro_batches: Mapping[int, Sequence[int]] = field(default_factory=dict)
    lead: int = 0
    entry: Mapping[tuple[int, int], int] = field(default_factory=dict)
    delays: Mapping[int, int] = field(default_factory=dict)
    accumulated: int = 1
    elsewhere: Mapping[Parameter, Sequence[int]] = field(default_factory=dict)
    optimizers: Callable[[], Sequence[Optimizer]] = lambda: ()

    def late(self, stage: int) -> int:
        """Updates between a forward of the stage and its backward, in the steady state."""
        return -(-self.delays.get(stage, 0) // self.accumulated)

    @property
    def most_late(self) -> int:
        """The most updates between a forward and its backward, on any stage."""
        return max(map(self.late, self.delays), default=0)


class WeightPolicy:
    """Base class of policies, each of one device: counts updates, and measures delays.

    It is called around every computation with weights, and around updates.

    Attributes:
        rewrites: whether a backward may compute with other values than its forward, where updates lie between them.
        updates: optimizer steps so far, which is the newest version.
        log: if not None, every computation appends (use, "F" or "B", version of its weights).
    """

    rewrites: ClassVar[bool] = True

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.updates = 0
        self.first = 0
        self.log: list[tuple[Use, str, int]] | None = None
        self._before: Callable[[int], int] = int

    @classmethod
    def copies(cls, delay: int) -> int:
        """Number of copies of a stage's weights that are kept besides the newest, given its delay in updates.

        Raises:
            ScheduleError: the policy does not allow such a delay. Planner and training ask here.
        """
        return 0

    def begin(self, before: Callable[[int], int], first: int) -> None:
        """Start with an empty pipeline at mini-batch `first`. `before(n)`: number of updates before mini-batch n's."""
        self._before, self.first = before, first
        self.updates = before(first)

    def empty(self) -> None:
        """Forget the micro-batches in the pipeline, which are dropped."""

    def delay(self, use: Use) -> int:
        """Number of updates between now and the backward of the micro-batch."""
        return self._before(use.mini_batch) - self.updates

    def delay_elsewhere(self, parameter: Parameter, mini_batch: int) -> int:
        """The most updates between a forward of the mini-batch and its backward, in stages on other devices."""
        stages = self.weights.elsewhere.get(parameter, ())
        ahead = max((self.weights.delays.get(stage, 0) for stage in stages), default=0)
        return self._before(mini_batch) - self._before(max(mini_batch - ahead, self.first))

    def enter_forward(self, use: Use) -> None:
        """Give the stage's parameters the values for a forward."""

    def leave_forward(self, use: Use) -> None:
        """Restore their newest values."""

    def enter_backward(self, use: Use) -> None:
        """Give the stage's parameters the values for a backward, or for the recomputation before it."""

    def leave_backward(self, use: Use) -> None:
        """Restore their newest values."""

    def before_update(self) -> None:
        """Prepare for an optimizer step, which changes the newest values in place."""

    def after_update(self) -> None:
        """Take note of the optimizer step's end."""
        self.updates += 1

    @property
    def bytes_kept(self) -> int:
        """Current memory of weights besides the newest ones."""
        return 0

    def saved(self) -> dict[str, dict[Parameter, Tensor]]:
        """The tensors by name that a run needs to go on with an empty pipeline."""
        return {}

    def restore(self, saved: Mapping[str, Mapping[Parameter, Tensor]]) -> None:
        """Load the result of `saved`; `updates` are those of that time, and mini-batches have the same numbers."""

    def note(self, use: Use, kind: str, version: int) -> None:
        """Write the log, if there is one."""
        if self.log is not None:
            self.log.append((use, kind, version))
