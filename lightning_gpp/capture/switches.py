"""Switches that the step itself sets, outside of forwards: frozen parameters, modules in evaluation.

Stages run on other ranks, which do not run the step. What a forward switches for itself is switched there.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_gpp.capture.refusal import refusal
from lightning_gpp.wording import named


class Switches:
    """Notes which flags of a module differ between its forwards.

    Args:
        module: the copy of the module on which the step runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._depth, self._switched = module, 0, dict[tuple[str, str], None]()
        for part in module.modules():
            if part is not module:
                part.register_forward_pre_hook(self._enter)
                part.register_forward_hook(self._leave)
        self._before = _flags(module)

    def _enter(self, *_: Any) -> None:
        if self._depth == 0:
            self._compare()
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._before = _flags(self._module)

    def _compare(self) -> None:
        now = _flags(self._module)
        self._switched |= dict.fromkeys(key for key, flag in now.items() if self._before.get(key, flag) != flag)

    def refuse(self, step: str) -> None:
        """Refuse a step that has switched something, at its end.

        Raises:
            CaptureError: it has.
        """
        if self._depth == 0:
            self._compare()
        if self._switched:
            (path, flag), *others = self._switched
            more = f" and {len(others)} more" if others else ""
            raise refusal(
                step,
                f"it changes {flag} of {named(path)}{more} for the forwards that follow, which run on other ranks",
                "do so in a hook, such as on_train_batch_start or on_train_epoch_start; or let the step run as a whole "
                "(strategy.step=whole)",
            )


def _flags(module: nn.Module) -> dict[tuple[str, str], bool]:
    """The flags `training` of modules and `requires_grad` of parameters, by path, as a recording does not observe."""
    parts = ((path, vars(part)) for path, part in module.named_modules())
    modes = {(path, "training"): own["training"] for path, own in parts if "training" in own}  # not of compiled ones
    return modes | {(name, "requires_grad"): each.requires_grad for name, each in module.named_parameters()}
