"""The memory model: bytes that the micro-batches in flight hold on a device, action by action.

List schedulers, the simulator and the evaluator of drafts all count by these rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from lightning_gpp.graph import Affine
from lightning_gpp.schedules.actions import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes that one micro-batch holds on a stage; affine in its samples.

    Args:
        kept: from the forward on: what autograd saves, or the inputs of a recomputed stage.
        working: in addition, from the recomputation on.
        pending: what of both is left between input and weight gradients; None: all of it.
    """

    kept: Affine
    working: Affine = Affine()
    pending: Affine | None = None

    def changes(self, num_samples: int, *, recomputes: bool) -> dict[Kind, float]:
        """Bytes that an action of each kind allocates, or frees if negative.

        Args:
            num_samples: of the micro-batch.
            recomputes: whether recomputations are actions of their own; otherwise they are part of the backwards.
        """
        kept, working = self.kept.at(num_samples), self.working.at(num_samples)
        held = kept + working if recomputes else kept
        left = kept + working if self.pending is None else min(kept + working, self.pending.at(num_samples))
        return {
            Kind.FORWARD: kept,
            Kind.RECOMPUTE: working,
            Kind.INPUT: left - held,
            Kind.WEIGHT: -left,
            Kind.BACKWARD: -held,
        }


def peak(changes: Iterable[float]) -> float:
    """The most bytes that are held at a time, from the bytes that are allocated or freed one after the other."""
    return max(accumulate(changes, initial=0.0))


def warm_up_peak(static: float, kept: float, working: float, in_flight: int) -> float:
    """Peak memory of a device with one stage and full backwards: `peak` after the warm-up and a recomputation.

    Args:
        static: bytes that stay: parameters, gradients, optimizer states.
        kept: bytes per micro-batch in flight.
        working: bytes of a recomputation.
        in_flight: micro-batches in flight.
    """
    return static + in_flight * kept + working
