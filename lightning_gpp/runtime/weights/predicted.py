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

A predictor is the change that an optimizer would make to a parameter in the next updates, by its rule. A *linear* one
assumes that every update is like the last one, as momentum keeps it; a *decay* predictor that gradients vanish, so that
only momentum continues. Learning rates are the current ones. Decoupled weight decay (AdamW) is left out by the linear
predictor, as PipeOptim and SpecTrain do; the decay predictor shrinks the weights in every predicted update, as FTPipe
does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_gpp.errors import ConfigError
from lightning_gpp.runtime.weights.latest import Latest, Values
from lightning_gpp.runtime.weights.policy import Use, Weights, register_weights

Group = dict[str, Any]
Descent = Callable[[Group, dict[str, Any], int], Tensor | None]
"""A function from a parameter group, the parameter's state and a number of updates to the change of the parameter,
before the learning rate; None if the optimizer has not stepped it yet.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """The prediction rule of one optimizer."""

    optimizer: Optimizer
    descent: Descent
    shrinks: bool

    def change(self, parameter: Parameter, group: Group, updates: int) -> Tensor | None:
        """The change of a parameter in that many updates; None if nothing is known about it yet."""
        descent = self.descent(group, self.optimizer.state.get(parameter, {}), updates)
        if descent is None:
            return None
        change: Tensor = -group["lr"] * descent
        return change - _lost(group, updates) * parameter.data if self.shrinks else change


def predictor_of(optimizer: Optimizer, kind: str) -> Rule:
    """The rule of an optimizer.

    Raises:
        ConfigError: it has none, or the rule needs more than the optimizer's state.
    """
    plain = getattr(optimizer, "optimizer", optimizer)
    rules = PREDICTORS[kind]
    if type(plain) not in rules:
        known = ", ".join(sorted(cls.__name__ for cls in rules))
        raise ConfigError(
            f"strategy.weights=predicted cannot predict {type(plain).__name__} with predictor={kind}; it knows "
            f"{known}. Use strategy.weights=stash, which works with all."
        )
    if kind == "linear" and any(not group.get("momentum", 1) or group.get("nesterov") for group in plain.param_groups):
        raise ConfigError(
            f"strategy.weights=predicted predicts by momentum, but {type(plain).__name__} has none, or Nesterov's, "
            "which depends on the next gradient. Use strategy.weights=stash, which works with all."
        )
    return Rule(plain, rules[type(plain)], kind == "decay")


def _shrink(group: Group) -> float:
    """The factor by which decoupled weight decay shrinks the weights in every update."""
    return float(1 - group["lr"] * group["weight_decay"]) if group.get("decoupled_weight_decay") else 1.0


def _lost(group: Group, updates: int) -> float:
    """The part of the weights that decoupled weight decay takes in that many updates."""
    return 1.0 - _shrink(group) ** updates


def _momentum(group: Group, state: dict[str, Any], updates: int) -> Tensor | None:
    buffer: Tensor | None = state.get("momentum_buffer")
    return None if buffer is None else updates * buffer


def _adam(group: Group, state: dict[str, Any], updates: int) -> Tensor | None:
    if "exp_avg" not in state:
        return None
    return updates * _adam_step(group, state, float(state["step"]))


def _adam_step(group: Group, state: dict[str, Any], step: float, power: float = 1.0) -> Tensor:
    first, second = group["betas"]
    square = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    mean = power * state["exp_avg"] / (1 - first**step)
    return torch.as_tensor(mean / ((square / (1 - second**step)).sqrt() + group["eps"]))


def _momentum_decaying(group: Group, state: dict[str, Any], updates: int) -> Tensor | None:
    momentum: float = group["momentum"]
    buffer: Tensor | None = state.get("momentum_buffer")
    if not momentum or buffer is None:
        return None
    first = 2 if group["nesterov"] else 1
    factor: float = sum(momentum**k for k in range(first, first + updates))
    return factor * buffer


def _adam_decaying(group: Group, state: dict[str, Any], updates: int) -> Tensor | None:
    """Adam's change if gradients vanish; the second moment stays the same, as in FTPipe."""
    if "exp_avg" not in state:
        return None
    step, first, shrink = float(state["step"]), group["betas"][0], _shrink(group)
    numbers = range(1, updates + 1)
    descents = [shrink ** (updates - k) * _adam_step(group, state, step + k, first**k) for k in numbers]
    return torch.stack(descents).sum(dim=0)


PREDICTORS: Final[dict[str, dict[type[Optimizer], Descent]]] = {
    "linear": {SGD: _momentum, RMSprop: _momentum, Adam: _adam, AdamW: _adam},
    "decay": {SGD: _momentum_decaying, Adam: _adam_decaying, AdamW: _adam_decaying},
}
"""Rules by kind of predictor and optimizer."""


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

    def _halfway(self, use: Use) -> int:
        """SpecTrain's floor(k / 2) for stage k of a chain: half of what the first stage is ahead of this one."""
        if self.passes == 1:
            return 0
        return (self.weights.most_late - self.weights.late(use.stage)) // 2

    def _values(self, use: Use) -> Values:
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
                    change = rule.change(parameter, group, updates)
                    if change is not None:
                        values[parameter] = parameter.data + change
        return values
