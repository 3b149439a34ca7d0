"""Base class of policies under which forward and backward of a micro-batch compute with one version of the weights.

Old versions are kept while they are needed, and made lazily: an update writes into new memory only if the old values
are still needed. Then the graphs that autograd built keep theirs, and backwards find them by the same pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.runtime.weights.interface import Use, WeightPolicy, Weights

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
        self.note(use, "F", version)
        self._swap(use.stage, version)

    def leave_forward(self, use: Use) -> None:
        self._swap_back()

    def enter_backward(self, use: Use) -> None:
        version = self._used[use[:3]]
        self.note(use, "B", version)
        self._swap(use.stage, version)

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

    @property
    def bytes_kept(self) -> int:
        return sum(data.nbytes for version in self._kept.values() for data in version.values())

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
