"""Weight policies: with which values of its parameters a stage computes, where several mini-batches are on their way.

*Version* v of the weights is what v optimizer steps made of them. A policy says which version a forward and a backward
compute with, or what they compute with instead, and keeps what that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


class Use(NamedTuple):
    """A computation of a stage with its weights: for a micro-batch of a mini-batch.

    `final`: the last one for this micro-batch.
    """

    stage: int
    mini_batch: int
    micro_batch: int
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one device.

    Args:
        parameters: of each of its stages, those that are trained.
        micro_batches: of each of its stages per mini-batch, on this device.
        lead: mini-batches by which any device of the pipeline is ahead at most.
        entry: for a stage and a micro-batch the mini-batches by which the stage that read it first is ahead.
        delays: for every stage of the plan the updates between a forward and its backward in the steady state.
        optimizers: those of the device.
        resumable: whether to keep what a run needs that goes on from a pipeline that is not empty.
    """

    parameters: Mapping[int, Sequence[Parameter]]
    micro_batches: Mapping[int, Sequence[int]] = field(default_factory=dict)
    lead: int = 0
    entry: Mapping[tuple[int, int], int] = field(default_factory=dict)
    delays: Mapping[int, int] = field(default_factory=dict)
    optimizers: Callable[[], Sequence[Optimizer]] = lambda: ()
    resumable: bool = False


class WeightPolicy(Protocol):
    """Called around everything that computes with weights, and around updates; on one device."""

    def begin(self, before: Callable[[int], int], first: int) -> None:
        """Start with an empty pipeline at mini-batch `first`. `before(n)`: updates before that of mini-batch n.

        A run that goes on from a pipeline that was not empty fills it again, and begins where it was empty before.
        """
        ...

    def enter_period(self, period: int) -> None:
        """A period of a fill, or the one that ends it: which updates it comes after."""
        ...

    def enter_forward(self, use: Use) -> None:
        """Give the stage's parameters the values for a forward."""
        ...

    def leave_forward(self, use: Use) -> None:
        """Give them their newest values again."""
        ...

    def enter_backward(self, use: Use) -> None:
        """Give the stage's parameters the values for a backward, or for the recomputation before it."""
        ...

    def leave_backward(self, use: Use) -> None:
        """Give them their newest values again."""
        ...

    def before_update(self) -> None:
        """An optimizer step follows, which changes the newest values in place."""
        ...

    def after_update(self) -> None:
        """The optimizer step is done."""
        ...

    @property
    def bytes_kept(self) -> int:
        """Memory of weights besides the newest ones, now."""
        ...


class Counting:
    """Base of policies: counts updates, and measures delays.

    Attributes:
        updates: optimizer steps before the current period: the newest version, unless a pipeline that was not empty is
            filled again.
        log: if not None, every computation appends (use, "F" or "B", version it computed with).
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.updates = 0
        self.first = 0
        self.log: list[tuple[Use, str, int]] | None = None
        self._before: Callable[[int], int] = int

    @classmethod
    def copies(cls, delay: int) -> int:
        """Copies of a stage's weights that are kept besides the newest, if the stage has this delay."""
        return 0

    def begin(self, before: Callable[[int], int], first: int) -> None:
        """See `WeightPolicy`."""
        self._before, self.first = before, first
        self.updates = before(first)

    def enter_period(self, period: int) -> None:
        """See `WeightPolicy`."""
        self.updates = self._before(max(period, self.first))

    def empty(self) -> None:
        """Forget the micro-batches on their way: they are given up."""

    def delay(self, use: Use) -> int:
        """Updates between now and the backward of the micro-batch."""
        return self._before(use.mini_batch) - self.updates

    def enter_forward(self, use: Use) -> None:
        """See `WeightPolicy`."""

    def leave_forward(self, use: Use) -> None:
        """See `WeightPolicy`."""

    def enter_backward(self, use: Use) -> None:
        """See `WeightPolicy`."""

    def leave_backward(self, use: Use) -> None:
        """See `WeightPolicy`."""

    def before_update(self) -> None:
        """See `WeightPolicy`."""

    def after_update(self) -> None:
        """See `WeightPolicy`."""
        self.updates += 1

    @property
    def bytes_kept(self) -> int:
        """See `WeightPolicy`."""
        return 0

    def saved(self) -> dict[str, dict[Parameter, Tensor]]:
        """The tensors by name that a run needs to go on as if it had not been interrupted."""
        return {}

    def restore(self, saved: Mapping[str, Mapping[Parameter, Tensor]]) -> None:
        """Take what `saved` gave; `updates` are those of that time, and mini-batches have the same numbers."""

    def note(self, use: Use, kind: str, version: int) -> None:
        """Write the log, if there is one."""
        if self.log is not None:
            self.log.append((use, kind, version))
