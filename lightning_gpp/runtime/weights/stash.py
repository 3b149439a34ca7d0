"""Weight stashing: a backward computes with the weights that its forward computed with.

The forward takes the newest weights of its stage or, with vertical sync, the version that the first stage had when the
micro-batch entered the pipeline, so that all stages compute with one version.

Source: PipeDream (Narayanan et al., SOSP 2019), section 3.3.
"""

from __future__ import annotations

from lightning_gpp.runtime.weights.interface import Use, Weights
from lightning_gpp.runtime.weights.registry import register_weights
from lightning_gpp.runtime.weights.versions import Versioned

# Three stages, one micro-batch per mini-batch: the version of each forward in the steady state. The backward of
# micro-batch j uses the same version, and its gradient updates version j.
#
#   micro-batch       2   3   4   5        with vertical sync
#   stage 0           0   1   2   3         0   1   2   3
#   stage 1           1   2   3   4         0   1   2   3
#   stage 2           2   3   4   5         0   1   2   3


@register_weights("stash")
class Stash(Versioned):
    """PipeDream's weight stashing.

    Args:
        weights: weights of the device.
        vertical_sync: whether to compute with the version of the stage that the micro-batch entered first.
    """

    def __init__(self, weights: Weights, *, vertical_sync: bool = False) -> None:
        super().__init__(weights)
        self.vertical_sync = vertical_sync

    @classmethod
    def copies(cls, delay: int) -> int:
        return delay

    def version_of(self, use: Use) -> int:
        return self._at_entry(use) if self.vertical_sync else self.updates

    def oldest(self, stage: int, newest: int) -> int:
        if not self.vertical_sync:
            return newest
        return newest - max((ahead for (number, _), ahead in self.weights.entry.items() if number == stage), default=0)

    def _at_entry(self, use: Use) -> int:
        period = max(self.first, use.mini_batch - self.weights.entry[use.stage, use.micro_batch])
        return self._before(period)
