"""Values that the training step keeps in attributes, and hooks read: with micro-batches they are those of the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_gpp.capture.attributes import Attribute, dotted
from lightning_gpp.hook_code import names_in_hook
from lightning_gpp.strategy.hooks.found import ACTING
from lightning_gpp.training.control import Control
from lightning_gpp.user_code import user_function


class ReadByHooks:
    """Warns of hooks that decide by what the step has changed on a part of the mini-batch, on the rank that runs it."""

    def __init__(self, module: pl.LightningModule, control: Control) -> None:
        self._module, self._control = module, control
        self._read: dict[str, str] | None = None

    def tell(self, changed: Mapping[Attribute, Any]) -> None:
        """Warn of each attribute once, for values that the step has changed in one of several micro-batches."""
        if self._read is None:
            self._read = _read_in_hooks(self._module)
        for name in sorted(dotted(key) for key, value in changed.items() if _may_be_a_mean(value)):
            reader = self._read.pop(name.rpartition(".")[2], None)
            if reader is not None:
                self._control.warn(
                    f"training_step sets {name}, and {reader} reads it: the step runs once per micro-batch, so that "
                    "the value is that of the last micro-batch, and not that of the mini-batch. Where it has to be "
                    "that of the mini-batch, let the step run as a whole (strategy.step=whole)."
                )


def _may_be_a_mean(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_may_be_a_mean, value.values()))
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _read_in_hooks(module: pl.LightningModule) -> dict[str, str]:
    """The names in the code of hooks that act on training, each with the hook that has it."""
    callbacks: list[pl.Callback] = module.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    found: dict[str, str] = {}
    for owner in (module, *callbacks):
        for hook in (*ACTING, "configure_optimizers"):
            if (function := user_function(getattr(type(owner), hook, None))) is not None:
                found |= dict.fromkeys(names_in_hook(function, [module, owner]), f"{type(owner).__name__}.{hook}")
    return found
