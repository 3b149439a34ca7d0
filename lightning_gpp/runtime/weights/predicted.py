"""Weight prediction: a forward computes with a prediction of the weights at the time of its backward.

    forward    newest + change that the optimizer would make in `delay` updates
    backward   newest

| system | what differs |
|---|---|
| PipeOptim | linear predictor, one prediction per mini-batch |
| SpecTrain | both passes are predicted, to the version at which the micro-batch leaves the first stage halfway |
| XPipe | one prediction per mini-batch, made by its first ("bellwether") micro-batch and shared by the others |
| MSNAG (FTPipe) | predictor that lets momentum decay instead of assuming that gradients stay |

Sources: PipeOptim (Guan et al., arXiv 2312.00839), SpecTrain (Chen et al., arXiv 1809.02839), XPipe (Guan et al., arXiv
1911.04610), FTPipe (Eliad et al., ATC 2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.errors import ConfigError
from lightning_gpp.runtime.weights.interface import Use, Weights
from lightning_gpp.runtime.weights.latest import Latest, Values
from lightning_gpp.runtime.weights.predictors import PREDICTORS, predictor_of
from lightning_gpp.runtime.weights.registry import register_weights


@register_weights("predicted")
class Predicted(Latest):
    """Predicts weights by the optimizer's rule.

    Args:
        weights: weights of the device.
        predictor: "linear" assumes that gradients stay the same, "decay" that they vanish.
        passes: 1 predicts for forwards only, 2 also for backwards, each to the version halfway (SpecTrain).
        bellwether: one prediction per mini-batch and stage instead of one per micro-batch (XPipe).

    Raises:
        ConfigError: an option has another value, or an optimizer of the device has no rule.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        predictor: Literal["linear", "decay"] = "linear",
        passes: Literal[1, 2] = 1,
        bellwether: bool = False,
    ) -> None:
        super().__init__(weights)
        if predictor not in PREDICTORS or passes not in (1, 2):
            raise ConfigError(
                f"strategy.weight_options has predictor={predictor!r} and passes={passes!r}; the predictor is one of "
                f"{', '.join(PREDICTORS)}, passes are 1 (forwards) or 2 (backwards, too)."
            )
        for optimizer in weights.optimizers():
            predictor_of(optimizer, predictor)
        self.predictor, self.passes, self.bellwether = predictor, passes, bellwether
        self._gradients: dict[Parameter, Tensor] = {}
        self._shared: dict[tuple[int, int], Values] = {}

    def empty(self) -> None:
        super().empty()
        self._shared = {}

    def forward_values(self, use: Use) -> Values:
        return self._shared_values(use) if self.bellwether else self._values(use)

    def enter_backward(self, use: Use) -> None:
        super().enter_backward(use)
        if self._halfway(use):
            self._write(self._predicted(use.stage, self._halfway(use)))

    def before_update(self) -> None:
        """Keep the gradients that the rules of some optimizers need."""
        rules = (predictor_of(optimizer, self.predictor) for optimizer in self.weights.optimizers())
        self._gradients = {
            parameter: parameter.grad.detach().clone()
            for rule in rules
            for parameter in rule.needing_gradients()
            if parameter.grad is not None
        }

    def saved(self) -> dict[str, dict[Parameter, Tensor]]:
        return {**super().saved(), "gradient": dict(self._gradients)}

    def restore(self, saved: Mapping[str, Values]) -> None:
        super().restore(saved)
        self._gradients = dict(saved.get("gradient", {}))

    @property
    def bytes_kept(self) -> int:
        shared = (value.nbytes for values in self._shared.values() for value in values.values())
        return sum(shared) + sum(gradient.nbytes for gradient in self._gradients.values())

    def _halfway(self, use: Use) -> int:
        """SpecTrain's floor(k / 2) for stage k of a chain: half of what the first stage is ahead of this one."""
        if self.passes == 1:
            return 0
        return (self.weights.most_late - self.weights.late(use.stage)) // 2

    def _values(self, use: Use) -> Values:
        if past := super().forward_values(use):
            return past
        updates = self.delay(use) + self._halfway(use)
        return self._predicted(use.stage, updates) if updates else {}

    def _shared_values(self, use: Use) -> Values:
        """The values of the mini-batch's first micro-batch, until its last, also for unpredicted parameters."""
        key, numbers = (use.stage, use.mini_batch), self.weights.micro_batches[use.stage]
        if key not in self._shared:
            late = self.weights.parameters[use.stage] if self.delay(use) > 0 else ()
            self._shared[key] = {**{parameter: parameter.data.clone() for parameter in late}, **self._values(use)}
        return self._shared.pop(key) if use.micro_batch == numbers[-1] else self._shared[key]

    @torch.no_grad()
    def _predicted(self, stage: int, updates: int) -> dict[Parameter, Tensor]:
        wanted = {id(parameter) for parameter in self.weights.parameters[stage]}
        values: dict[Parameter, Tensor] = {}
        for optimizer in self.weights.optimizers():
            rule = predictor_of(optimizer, self.predictor)
            for group in optimizer.param_groups:
                for parameter in (parameter for parameter in group["params"] if id(parameter) in wanted):
                    change = rule.change(parameter, group, updates, self._gradients.get(parameter))
                    if change is not None:
                        values[parameter] = parameter.data + change
        return values
