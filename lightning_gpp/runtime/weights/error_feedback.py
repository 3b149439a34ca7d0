"""Double buffering whose updates anticipate how the next one differs, because each is computed one update late."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.runtime.weights.policy import Weights, register_weights
from lightning_gpp.runtime.weights.versions import DoubleBuffer


@register_weights("error_feedback")
class ErrorFeedback(DoubleBuffer):
    """Adds to every late update a multiple of its difference from the one before.

        weights  +=  u_t + coefficient * (u_t - u_{t-1})

    u_t is what the optimizer, with its momentum, rates and weight decay, has changed in update t by the gradient of the
    version before. With coefficient 1 the weights move as if u were extrapolated linearly to the newest version. The
    differences cancel: after any number of updates the weights are those of the sum of all u, and once more the latest.
    The first late update has none before it, and is made as it is.

    Source: Zmushko et al., ICML 2026, arXiv 2606.30634, for PipeDream-2BW's delay of one update; the rule follows the
    implementation of its algorithms in RamTorch (`delayed_optim.py`).

    Args:
        weights: weights of the device.
        coefficient: weight of the difference; 0 is plain double buffering.
    """

    def __init__(self, weights: Weights, *, coefficient: float = 1.0) -> None:
        super().__init__(weights)
        self.coefficient = coefficient
        self._latest: dict[Parameter, Tensor] = {}

    @classmethod
    def copies(cls, delay: int) -> int:
        return super().copies(delay) + 1

    def after_update(self) -> None:
        for parameter, old in self._kept.get(self.updates, {}).items():  # none before updates are late
            update = parameter.data - old
            if parameter in self._latest:
                parameter.data.add_(update - self._latest[parameter], alpha=self.coefficient)
            self._latest[parameter] = update
        super().after_update()

    def saved(self) -> dict[str, dict[Parameter, Tensor]]:
        return {**super().saved(), "latest": dict(self._latest)}

    def restore(self, saved: Mapping[str, Mapping[Parameter, Tensor]]) -> None:
        self._latest = dict(saved.get("latest", {}))
        super().restore({name: values for name, values in saved.items() if name != "latest"})
