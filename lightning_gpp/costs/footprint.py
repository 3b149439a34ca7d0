"""The footprint of parameters: bytes that a device keeps all the time for weights, gradients and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from lightning_gpp.errors import ConfigError

OPTIMIZER_STATES: Final = {"none": 0, "sgd": 0, "sgd_momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
"""Tensors of the parameter's size that an optimizer of torch.optim keeps for each parameter."""

PRECISIONS: Final = {"64-true": 0.0, "32-true": 0.0, "bf16-true": 0.0, "16-true": 0.0, "bf16-mixed": 0.5}
"""Lightning's precisions, and what autocast adds per byte of a float32 parameter: a cached copy of half the size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that a device keeps per byte of parameters.

    Args:
        optimizer: a key of OPTIMIZER_STATES.
        precision: a key of PRECISIONS. With "...-true" the parameters themselves have that precision already.

    Raises:
        ConfigError: the optimizer or precision is unknown.
    """

    optimizer: str = "adam"
    precision: str = "32-true"

    def __post_init__(self) -> None:
        for key, allowed in (("optimizer", OPTIMIZER_STATES), ("precision", PRECISIONS)):
            value = getattr(self, key)
            if value not in allowed:
                close = get_close_matches(str(value), allowed, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"footprint.{key}={value!r} is unknown; choose one of {', '.join(allowed)}.{hint}")

    @property
    def copies(self) -> float:
        """Copies per byte: weights, gradients, the optimizer's state, and autocast's copy."""
        return 2 + OPTIMIZER_STATES[self.optimizer] + PRECISIONS[self.precision]
