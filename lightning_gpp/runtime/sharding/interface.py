"""The interface of the data parallelism inside stages, which the executor calls."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class StageSync(Protocol):
    """Gathers a stage's parameters before its work, and adds up its gradients over the replicas after it.

    All replicas of a stage make the same calls for it in the same order: collectives match by order alone. How many
    micro-batches a replica computes in between does not matter.

    Attributes:
        gathers: whether actions must wait for their parameters (`ready`). It never changes.
        last: whether an optimizer step follows this mini-batch. To be set before every mini-batch: it begins one.
    """

    gathers: bool
    last: bool

    def unshard(self, stage: int) -> None:
        """Start to gather the stage's parameters. Returns at once."""
        ...

    def ready(self, stage: int) -> None:
        """Wait until the stage's parameters are whole; gather them if nobody has started to. Before every action."""
        ...

    def reshard(self, stage: int) -> None:
        """Free what the other replicas keep of the stage's parameters."""
        ...

    def arm(self, stage: int) -> None:
        """The next backward of the stage is its last one of this mini-batch."""
        ...

    def reduce(self, stage: int) -> None:
        """All backwards of the stage are done: start to add up its gradients."""
        ...

    def sync(self) -> None:
        """After the last mini-batch before an optimizer step: afterwards all gradients are sums over the replicas."""
        ...

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of the whole model's gradient, the same float64 number on all ranks, which all call this. After `sync`.

        Args:
            norm_type: p of the p-norm, above 0; may be infinite.

        Raises:
            ConfigError: `norm_type` is not above 0.
        """
        ...
