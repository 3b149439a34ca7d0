"""Always the newest weights: forwards and backwards each take those of their own time.

The two differ by the updates in between, so the gradient is that of no function. Other policies repair this failure; it
is the base class of those that change the values to compute with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.runtime.weights.interface import Use, WeightPolicy, Weights
from lightning_gpp.runtime.weights.registry import register_weights

Values = Mapping[Parameter, Tensor]
"""The values of parameters during a computation; parameters that are missing keep their own."""


@register_weights("latest")
class Latest(WeightPolicy):
    """No copies. Subclasses write other values into the memory of the parameters during a computation.

    Autograd keeps pointers into that memory, so a backward computes with its content at that time.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._forwards: dict[tuple[int, int, int], int] = {}
        self._newest: list[tuple[Tensor, Tensor]] = []

    def begin(self, before: Callable[[int], int], first: int) -> None:
        super().begin(before, first)
        self._forwards = {}

    def empty(self) -> None:
        self._forwards = {}

    def enter_forward(self, use: Use) -> None:
        self._forwards[use[:3]] = self.updates
        self.note(use, "F", self.updates)
        self._write(self.forward_values(use))

    def forward_values(self, use: Use) -> Values:
        """The values that a forward computes with."""
        return {}

    def leave_forward(self, use: Use) -> None:
        self._restore()

    def enter_backward(self, use: Use) -> None:
        self.note(use, "B", self.updates)

    def leave_backward(self, use: Use) -> None:
        self._restore()
        if use.final:
            del self._forwards[use[:3]]

    def measured_delay(self, use: Use) -> int:
        """Number of updates since the forward of the micro-batch."""
        return self.updates - self._forwards[use[:3]]

    def _write(self, values: Values) -> None:
        self._newest = [(parameter.data, parameter.data.clone()) for parameter in values]
        for parameter, value in values.items():
            parameter.data.copy_(value)

    def _restore(self) -> None:
        for memory, value in self._newest:
            memory.copy_(value)
        self._newest = []
