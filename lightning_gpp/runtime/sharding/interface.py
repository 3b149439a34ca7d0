"""The interface of the data parallelism inside stages, which the executor calls."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class StageSync(Protocol):
    """Unshards a stage's parameters before its work, and reduces its gradients over the replicas after it.

    All replicas of a stage make the same calls for it in the same order, because collectives match by order alone. The
    number of micro-batches that a replica computes in between does not matter.

    Attributes:
        gathers: whether actions must wait for their parameters (`ready`); it never changes.
        last: whether an optimizer step follows this mini-batch. Setting it begins a mini-batch, so set it before each.
    """

    gathers: bool
    last: bool

    def unshard(self, stage: int) -> None:
        """Start to unshard the stage's parameters; returns at once."""
        ...

    def ready(self, stage: int) -> None:
        """Wait until the stage's parameters are unsharded; start it if necessary. Called before every action."""
        ...

    def reshard(self, stage: int) -> None:
        """Free the other replicas' shards of the stage's parameters."""
        ...

    def arm(self, stage: int) -> None:
        """Announce that the next backward of the stage is its last one of this mini-batch."""
        ...

    def reduce(self, stage: int) -> None:
        """Start to reduce the stage's gradients, after all its backwards."""
        ...

    def sync(self) -> None:
        """Wait until all gradients are sums over the replicas; called right before an optimizer step."""
        ...

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of the full model's gradient, the same float64 number on all ranks. All ranks call this, after `sync`.

        Args:
            norm_type: p of the p-norm, above 0; may be infinite.

        Raises:
            ConfigError: `norm_type` is not above 0.
        """
        ...
