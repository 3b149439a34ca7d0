"""Policies without old versions: the newest weights (`latest`), and PipeMare, which corrects for updates in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.runtime.weights.policy import Use, WeightPolicy, Weights, register_weights

Values = Mapping[Parameter, Tensor]
"""The values of parameters during a computation; parameters that are missing keep their own."""


@register_weights("latest")
class Latest(WeightPolicy):
    """Forwards and backwards each take the newest weights of their own time, without copies.

    The two differ by the updates in between, so the gradient is that of no function. Subclasses repair this: they write
    other values into the memory of the parameters during a computation. Autograd keeps pointers into that memory, so a
    backward computes with its content at that time.
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
        self._write(self.forward_values(use))

    def forward_values(self, use: Use) -> Values:
        """The values that a forward computes with."""
        return {}

    def leave_forward(self, use: Use) -> None:
        self._restore()

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


@register_weights("corrected")
class Corrected(Latest):
    """PipeMare: learning rates rescaled by delays (T1), and backwards with an estimate of the forward's weights (T2).

        T1   update of stage s  *=  1 / delay_s ** p,        p = 1 - min(k / rescale_steps, 1) after k late updates
        T2   velocity  =  gamma * velocity + (1 - gamma) * update,       gamma = decay ** (1 / delay_s)
             the backward computes with  newest - delay_s * velocity

    T3, synchronous first steps, is `strategy.synchronous_steps`. The delay is the counted number of updates between the
    forward and the backward of a micro-batch; updates without a delay are not late, so T1 begins after T3.

    Sources: PipeMare (Yang et al., MLSys 2021, arXiv 1910.05124), sections 3.1 to 3.3. The paper counts two slots per
    stage of a finer pipeline; here delays follow from the program's order. LayerPipe2 (Unnikrishnan and Parhi, arXiv
    2512.08160) has no T1, and a velocity that is the mean of the late updates until there are more than delay_s, then

        gamma  =  delay_s / (delay_s + 1),        which is T2 with decay = (1 + 1 / delay_s) ** -delay_s

    Here the mean is one of changes of the weights, whatever the optimizer.

    Args:
        weights: weights of the device.
        rescale_steps: number of late updates over which T1 is annealed; 0 switches it off.
        discrepancy_decay: D of T2, between 0 and 1, or "window" for LayerPipe2's gamma; 0 switches T2 off.
    """

    def __init__(
        self, weights: Weights, *, rescale_steps: int = 1000, discrepancy_decay: float | Literal["window"] = 0.135
    ) -> None:
        super().__init__(weights)
        self.rescale_steps, self.discrepancy_decay = rescale_steps, discrepancy_decay
        self._delay: dict[Parameter, int] = {}  # the largest since the latest update
        self._velocity: dict[Parameter, Tensor] = {}
        self._late: dict[Parameter, int] = {}  # late updates so far
        self._old: dict[Parameter, Tensor] = {}

    @classmethod
    def copies(cls, delay: int) -> int:
        return min(delay, 1)

    def enter_backward(self, use: Use) -> None:
        super().enter_backward(use)
        delay = self.measured_delay(use)
        parameters = self.weights.parameters[use.stage]
        self._delay.update({parameter: max(delay, self._delay.get(parameter, 0)) for parameter in parameters})
        for parameter in self.weights.elsewhere:  # all devices that have it correct it alike
            if parameter in self._delay:
                others = self.delay_elsewhere(parameter, use.mini_batch)
                self._delay[parameter] = max(others, self._delay[parameter])
        if delay and self.discrepancy_decay:
            known = [parameter for parameter in parameters if parameter in self._velocity]
            self._write({parameter: parameter.data - delay * self._velocity[parameter] for parameter in known})

    def before_update(self) -> None:
        self._old = {p: p.data.clone() for p, delay in self._delay.items() if delay and self._corrects(p)}

    def after_update(self) -> None:
        for parameter, old in self._old.items():
            update = parameter.data - old
            scale = self._scale(parameter)
            if scale != 1.0:
                update *= scale
                parameter.data.copy_(old + update)
            if self.discrepancy_decay:
                self._follow(parameter, update)
        self._old, self._delay = {}, {}
        super().after_update()

    def saved(self) -> dict[str, dict[Parameter, Tensor]]:
        late = {parameter: torch.tensor(number) for parameter, number in self._late.items()}
        return {"velocity": dict(self._velocity), "late": late}

    def restore(self, saved: Mapping[str, Values]) -> None:
        self._velocity = dict(saved.get("velocity", {}))
        self._late = {parameter: int(number) for parameter, number in saved.get("late", {}).items()}

    def _corrects(self, parameter: Parameter) -> bool:
        return bool(self.discrepancy_decay) or self._late.get(parameter, 0) < self.rescale_steps

    def _scale(self, parameter: Parameter) -> float:
        """T1's factor for this late update."""
        number = self._late.get(parameter, 0)
        self._late[parameter] = number + 1
        if number >= self.rescale_steps:
            return 1.0
        return float(self._delay[parameter] ** (number / self.rescale_steps - 1.0))

    def _follow(self, parameter: Parameter, update: Tensor) -> None:
        gamma = self._gamma(self._delay[parameter], self._late[parameter])
        velocity = self._velocity.get(parameter)
        mixed = update * (1 - gamma)
        self._velocity[parameter] = mixed if velocity is None else velocity.mul_(gamma).add_(mixed)

    def _gamma(self, delay: int, number: int) -> float:
        """The share that its old value has in the velocity after this late update, the number-th."""
        if self.discrepancy_decay == "window":
            return 1 - 1 / min(number, delay + 1)
        return math.pow(self.discrepancy_decay, 1 / delay)
