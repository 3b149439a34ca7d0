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

    Autograd keeps pointers into that memory, so a backward computes with its content at that time. The values of a
    forward are gone after the next update; for resumable runs they are copied to the host while the micro-batch is in
    flight, so that the forward can be run again.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._forwards: dict[tuple[int, int, int], int] = {}
        self._newest: list[tuple[Tensor, Tensor]] = []
        self._past: dict[tuple[int, int, int], Values] = {}  # by stage, mini-batch and updates before the forward

    def begin(self, before: Callable[[int], int], first: int) -> None:
        super().begin(before, first)
        self._forwards = {}

    def empty(self) -> None:
        self._forwards, self._past = {}, {}

    def enter_forward(self, use: Use) -> None:
        self._forwards[use[:3]] = self.updates
        self.note(use, "F", self.updates)
        self._write(self.forward_values(use))
        if self.weights.resumable and self.delay(use) > 0:
            self._keep(use)

    def forward_values(self, use: Use) -> Values:
        """The values that a forward computes with; if it runs again, those of the first time."""
        return self._past.get((use.stage, use.mini_batch, self.updates), {})

    def leave_forward(self, use: Use) -> None:
        self._restore()

    def enter_backward(self, use: Use) -> None:
        self.note(use, "B", self.updates)

    def leave_backward(self, use: Use) -> None:
        self._restore()
        if use.final:
            del self._forwards[use[:3]]

    def after_update(self) -> None:
        super().after_update()
        on_their_way = {(stage, batch) for stage, batch, _ in self._forwards}
        self._past = {key: values for key, values in self._past.items() if key[:2] in on_their_way}

    def saved(self) -> dict[str, dict[Parameter, Tensor]]:
        return {"/".join(map(str, key)): dict(values) for key, values in self._past.items()}

    def restore(self, saved: Mapping[str, Values]) -> None:
        self._past = {_key(name): values for name, values in saved.items() if "/" in name}

    def measured_delay(self, use: Use) -> int:
        """Number of updates since the forward of the micro-batch."""
        return self.updates - self._forwards[use[:3]]

    def _keep(self, use: Use) -> None:
        key = use.stage, use.mini_batch, self.updates
        if key not in self._past:
            self._past[key] = {p: p.data.to("cpu", copy=True) for p in self.weights.parameters[use.stage]}

    def _write(self, values: Values) -> None:
        self._newest = [(parameter.data, parameter.data.clone()) for parameter in values]
        for parameter, value in values.items():
            parameter.data.copy_(value)

    def _restore(self) -> None:
        for memory, value in self._newest:
            memory.copy_(value)
        self._newest = []


def _key(name: str) -> tuple[int, int, int]:
    stage, batch, updates = map(int, name.split("/"))
    return stage, batch, updates
