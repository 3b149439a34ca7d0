"""Gradients of several devices on one: kept apart by device, and summed as the devices would sum them.

A device adds up the gradients of its micro-batches one after the other; then an all-reduce adds up those of the devices
with the same parameter. One device that does the work of all would add everything in one sequence, and end with other
last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter


class DeviceGradients:
    """The gradients that one device collects for several.

    Two devices are summed bit for bit as an all-reduce would; for more, the order of an all-reduce is its own.

    Args:
        parameters: gives those of each stage.
    """

    def __init__(self, parameters: Callable[[], Mapping[int, Sequence[Parameter]]]) -> None:
        self._parameters = parameters
        self._kept: dict[int, dict[Parameter, Tensor]] = {}

    def enter(self, stage: int, device: int) -> None:
        """Gradients of the stage are added to those of this device from now on."""
        kept = self._kept.setdefault(device, {})
        for parameter in self._parameters()[stage]:
            parameter.grad = kept.get(parameter)

    def leave(self, stage: int, device: int) -> None:
        """Put them aside."""
        for parameter in self._parameters()[stage]:
            if parameter.grad is not None:
                self._kept[device][parameter] = parameter.grad
                parameter.grad = None

    def sum(self) -> None:
        """Give every parameter the sum of its gradients, in the order of the devices."""
        for _, kept in sorted(self._kept.items()):
            for parameter, gradient in kept.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._kept.clear()
