"""The scale of the loss in half precision, which all ranks change together: an infinite gradient on one skips on all.

Every rank has the gradients of its stages only, so torch's `GradScaler` alone would skip steps and change the scale by
itself on each. Here what it looks for is agreed on by all ranks, also by those without a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp import GradScaler

from lightning_gpp._compat.torch import check_gradients_by, check_gradients_plainly
from lightning_gpp.option import refuse_beside
from lightning_gpp.training.control import Control
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.options import Options


class LossScale:
    """The scale of a run. All ranks attach it together, and step their optimizers in the same order.

    Args:
        scaler: the scaler, which is enabled.
        control: the side channel of this rank.
        device: the device of this rank.
    """

    def __init__(self, scaler: GradScaler, control: Control, device: torch.device) -> None:
        self._scaler, self._control, self._device = scaler, control, device

    @classmethod
    def of(cls, scaler: GradScaler | None, control: Control, device: torch.device) -> LossScale | None:
        """The scale of a run; None if there is no scaler, or one that is not enabled."""
        return cls(scaler, control, device) if scaler is not None and scaler.is_enabled() else None

    @property
    def factor(self) -> float:
        """The factor of the loss in the current step."""
        return self._scaler.get_scale()

    def attach(self) -> None:
        """Let all ranks agree on gradients that are not finite."""
        if self._control.num_processes > 1:
            check_gradients_by(self._scaler, self._agreed)

    def detach(self) -> None:
        """Undo `attach`."""
        check_gradients_plainly(self._scaler)

    def _agreed(self, found: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """One number: above 0 if some gradient on some rank is not finite."""
        here = any(bool(each.item()) for each in found.values())
        anywhere = self._control.unanimous(here, everyone=False)
        return {self._device: torch.full((1,), float(anywhere), device=self._device)}


def check_scaled(options: Options) -> None:
    """Refuse options that a scaled loss does not support.

    Raises:
        ConfigError: names the option and a remedy.
    """
    problems = {
        "weights": (
            options.weights != SYNCHRONOUS,
            "would give mini-batches in flight different scales. Leave it out",
        ),
        "sharding": (options.sharding == "fsdp", "shards gradients, at which the scaler cannot look. Leave it out"),
        "on_nonfinite": (
            options.on_nonfinite in ("stop", "skip"),
            "is what the scaler does, on all ranks, which then takes a smaller scale. Leave it out",
        ),
    }
    refuse_beside("trainer.precision='16-mixed', which scales the loss (bf16-mixed does not)", options, problems)
