"""Double-buffered weights: all stages compute with the version before the newest, so gradients are one update late.

Mini-batch t computes with version t - 1 in its forwards and backwards, on every stage; two versions are kept, whatever
the depth of the pipeline. This allows one mini-batch in the pipeline besides the current one.

Source: PipeDream-2BW (Narayanan et al., ICML 2021, arXiv 2006.09503), section 3.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_gpp.errors import ScheduleError
from lightning_gpp.runtime.weights.interface import Use, Weights
from lightning_gpp.runtime.weights.registry import register_weights
from lightning_gpp.runtime.weights.versions import Versioned


@register_weights("double_buffer")
class DoubleBuffer(Versioned):
    """PipeDream-2BW's two versions.

    Raises (in `copies` and `begin`):
        ScheduleError: a stage is ahead by more than one update.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._late = 0
        self._first = 0  # the oldest version there was when updates began to be late

    @classmethod
    def copies(cls, delay: int) -> int:
        if delay > 1:
            raise ScheduleError(
                f"strategy.weights=double_buffer keeps two versions of the weights, but the first stages are {delay} "
                "optimizer steps ahead. Cut the mini-batch into at least as many micro-batches as the first stage has "
                "in flight (strategy.num_micro_batches), or use strategy.weights=stash."
            )
        return 1

    def begin(self, before: Callable[[int], int], first: int) -> None:
        super().begin(before, first)
        late = self.weights.most_late
        self.copies(late)
        if late and not self._late:
            self._late, self._first = 1, min([self.updates, *self._kept])

    def version_of(self, use: Use) -> int:
        return max(self._before(use.mini_batch) - self._late, self._first)

    def oldest(self, stage: int, newest: int) -> int:
        return newest - self._late
