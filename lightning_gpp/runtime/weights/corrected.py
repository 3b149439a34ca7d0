"""PipeMare: learning rates rescaled by the delay (T1), and backwards with an estimate of the forward's weights (T2).

    T1   update of stage s  *=  1 / delay_s ** p,        p = 1 - min(k / rescale_steps, 1) after k late updates
    T2   velocity  =  gamma * velocity + (1 - gamma) * update,       gamma = decay ** (1 / delay_s)
         the backward computes with  newest - delay_s * velocity

T3, synchronous first steps, is `strategy.synchronous_steps`. The delay is the counted number of updates between the
forward and the backward of a micro-batch; updates without a delay are not late, so T1 begins after T3.

Source: PipeMare (Yang et al., MLSys 2021, arXiv 1910.05124), sections 3.1 to 3.3. The paper counts two slots per stage
of a finer pipeline; here delays follow from the program's order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.runtime.weights.interface import Use, Weights
from lightning_gpp.runtime.weights.latest import Latest, Values
from lightning_gpp.runtime.weights.registry import register_weights


@register_weights("corrected")
class Corrected(Latest):
    """PipeMare's corrections.

    Args:
        weights: weights of the device.
        rescale_steps: number of late updates over which T1 is annealed; 0 switches it off.
        discrepancy_decay: D of T2, between 0 and 1; 0 switches it off.
    """

    def __init__(self, weights: Weights, *, rescale_steps: int = 1000, discrepancy_decay: float = 0.135) -> None:
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

    @property
    def bytes_kept(self) -> int:
        return sum(velocity.nbytes for velocity in self._velocity.values())

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
        gamma = self.discrepancy_decay ** (1 / self._delay[parameter])
        velocity = self._velocity.get(parameter)
        mixed = update * (1 - gamma)
        self._velocity[parameter] = mixed if velocity is None else velocity.mul_(gamma).add_(mixed)
