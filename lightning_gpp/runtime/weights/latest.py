"""The newest weights, always: forwards take those that are there, backwards those that are there then.

The two differ by the updates in between, so the gradient is that of no function. It is the failure that other policies
repair, and the base of those that change what is computed with.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.runtime.weights.interface import Counting, Use, Weights
from lightning_gpp.runtime.weights.registry import register


@register("latest")
class Latest(Counting):
    """No copies. Subclasses write other values into the memory of the parameters for the time of a computation.

    Autograd keeps pointers into that memory, so a backward computes with what it holds by then.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._forwards: dict[tuple[int, int, int], int] = {}
        self._newest: list[tuple[Tensor, Tensor]] = []

    def enter_forward(self, use: Use) -> None:
        self._forwards[use[:3]] = self.updates
        self.note(use, "F", self.updates)

    def leave_forward(self, use: Use) -> None:
        self._restore()

    def enter_backward(self, use: Use) -> None:
        self.note(use, "B", self.updates)

    def leave_backward(self, use: Use) -> None:
        self._restore()
        if use.final:
            del self._forwards[use[:3]]

    def measured_delay(self, use: Use) -> int:
        """Updates since the forward of the micro-batch."""
        return self.updates - self._forwards[use[:3]]

    def _write(self, values: dict[Parameter, Tensor]) -> None:
        self._newest = [(parameter.data, parameter.data.clone()) for parameter in values]
        for parameter, value in values.items():
            parameter.data.copy_(value)

    def _restore(self) -> None:
        for memory, value in self._newest:
            memory.copy_(value)
        self._newest = []
