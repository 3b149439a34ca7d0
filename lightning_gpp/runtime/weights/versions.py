"""Policies under which forward and backward of a micro-batch compute with one version of the weights.

Old versions are kept while they are needed, and made lazily: an update writes into new memory only if the old values
are still needed. Then the graphs that autograd built keep theirs, and backwards find them by the same pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.errors import ScheduleError
from lightning_gpp.runtime.weights.policy import Use, WeightPolicy, Weights, register_weights

_Key = tuple[int, int, int]


class Versioned(WeightPolicy):
    """Computes with the version that `version_of` names; `oldest` bounds the versions of later forwards."""

    rewrites: ClassVar[bool] = False

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._kept: dict[int, dict[Parameter, Tensor]] = {}
        self._used: dict[_Key, int] = {}
        self._newest: list[tuple[Parameter, Tensor]] = []
        self._in_place = 0  # the version that the parameters have between computations

    def begin(self, before: Callable[[int], int], first: int) -> None:
        self._in_place = self.updates
        super().begin(before, first)

    def empty(self) -> None:
        self._used = {}
        self._forget()

    def version_of(self, use: Use) -> int:
        """The version for a forward that begins now."""
        raise TypeError(f"{type(self).__name__} names no version.")

    def oldest(self, stage: int, newest: int) -> int:
        """The oldest version that a forward of the stage may still need once there is version `newest`."""
        raise TypeError(f"{type(self).__name__} names no version.")

    def enter_forward(self, use: Use) -> None:
        version = self._used[use[:3]] = self.version_of(use)
        self._swap(use.stage, version)

    def leave_forward(self, use: Use) -> None:
        self._swap_back()

    def enter_backward(self, use: Use) -> None:
        self._swap(use.stage, self._used[use[:3]])

    def leave_backward(self, use: Use) -> None:
        self._swap_back()
        if use.final:
            del self._used[use[:3]]

    def before_update(self) -> None:
        needed = self._needed(self.updates + 1)
        kept = {
            parameter: parameter.data
            for stage, parameters in self.weights.parameters.items()
            if self.updates in needed[stage]
            for parameter in parameters
        }
        for parameter, data in kept.items():
            parameter.data = data.clone()
        if kept:
            self._kept[self.updates] = kept

    def after_update(self) -> None:
        super().after_update()
        self._in_place = self.updates
        self._forget()

    def saved(self) -> dict[str, dict[Parameter, Tensor]]:
        return {str(version): dict(values) for version, values in self._kept.items()}

    def restore(self, saved: Mapping[str, Mapping[Parameter, Tensor]]) -> None:
        self._kept = {int(version): dict(values) for version, values in saved.items()}

    def _forget(self) -> None:
        needed = self._needed(self.updates)
        for version in list(self._kept):
            wanted = {
                parameter
                for stage, parameters in self.weights.parameters.items()
                if version in needed[stage]
                for parameter in parameters
            }
            self._kept[version] = {p: data for p, data in self._kept[version].items() if p in wanted}
            if not self._kept[version]:
                del self._kept[version]

    def _needed(self, newest: int) -> dict[int, set[int]]:
        """The versions that backwards in flight, or later forwards, of every stage need."""
        needed = {stage: set(range(self.oldest(stage, newest), newest + 1)) for stage in self.weights.parameters}
        for (stage, _, _), version in self._used.items():
            needed[stage].add(version)
        return needed

    def _swap(self, stage: int, version: int) -> None:
        if version == self._in_place or not self.weights.parameters[stage]:
            return
        kept = self._kept[version]
        self._newest = [(parameter, parameter.data) for parameter in self.weights.parameters[stage]]
        for parameter in self.weights.parameters[stage]:
            parameter.data = kept[parameter]

    def _swap_back(self) -> None:
        for parameter, data in self._newest:
            parameter.data = data
        self._newest = []


# Three stages, one micro-batch per mini-batch: the version of each forward in the steady state. The backward of
# micro-batch j uses the same version, and its gradient updates version j.
#
#   micro-batch       2   3   4   5        with vertical sync
#   stage 0           0   1   2   3         0   1   2   3
#   stage 1           1   2   3   4         0   1   2   3
#   stage 2           2   3   4   5         0   1   2   3


@register_weights("stash")
class Stash(Versioned):
    """Weight stashing: a backward computes with the weights that its forward computed with.

    The forward takes the newest weights of its stage or, with vertical sync, the version that the first stage had when
    the micro-batch entered the pipeline, so that all stages compute with one version.

    Source: PipeDream (Narayanan et al., SOSP 2019), section 3.3.

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


@register_weights("double_buffer")
class DoubleBuffer(Versioned):
    """All stages compute with the version before the newest, so gradients are one update late.

    Mini-batch t computes with version t - 1 in its forwards and backwards, on every stage; two versions are kept,
    whatever the depth of the pipeline. This allows one mini-batch in the pipeline besides the current one.

    Source: PipeDream-2BW (Narayanan et al., ICML 2021, arXiv 2006.09503), section 3.

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
                "optimizer steps ahead. Use strategy.weights=stash."
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
