"""Values that steps keep in attributes of the module, for hooks that run on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from typing import Any, Final

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from lightning_gpp._compat.lightning_module import LIGHTNING_STATE
from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.attributes import OF_EVERY_MODULE, TOLD, Attribute, dotted
from lightning_gpp.strategy.user_hooks import names_in, user_hooks
from lightning_gpp.training.control import Control
from lightning_gpp.training.hook_code import names_in_hook
from lightning_gpp.training.step_attributes import StepAttributes
from lightning_gpp.user_code import user_function

_ACTING: Final = (
    *("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("optimizer_step", "lr_scheduler_step", "configure_optimizers"),
)
"""Methods that change gradients, parameters and learning rates, or make functions that do."""


class KeptByStep:
    """The attributes that the step has changed, on the rank that runs it.

    With several micro-batches they have the values of the last one, and a hook that decides by them is told of.
    """

    def __init__(self, module: pl.LightningModule, control: Control) -> None:
        self._module, self._control = module, control
        self._attributes = StepAttributes(module)
        self._read: dict[str, str] | None = None

    def note(self) -> None:
        """Note the values before the step."""
        self._attributes.note()

    def changed(self, num_micro_batches: int) -> dict[Attribute, Any]:
        """The values that the step has changed."""
        changed = self._attributes.changed()
        if changed and num_micro_batches > 1:
            self._tell_parts({dotted(key) for key, value in changed.items() if _may_be_a_mean(value)})
        return changed

    def _tell_parts(self, names: Iterable[str]) -> None:
        if self._read is None:
            self._read = _read_in_hooks(self._module)
        for name in sorted(names):
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
        for hook in _ACTING:
            if (function := user_function(getattr(type(owner), hook, None))) is not None:
                found |= dict.fromkeys(names_in_hook(function, [module, owner]), f"{type(owner).__name__}.{hook}")
    return found


class ResultsOfSteps:
    """Gives all ranks what steps have collected for the hooks at the end of an epoch, such as lists of results.

    Predictions stay where they are: their hooks write files.
    """

    def __init__(self, trainer: pl.Trainer, control: Control, device: torch.device) -> None:
        self._trainer, self._control, self._device = trainer, control, device
        self._names: dict[str, set[str]] = {}

    def share(self, step: str) -> None:
        """Share the attributes that the code of hooks names. All ranks call this before these hooks."""
        if step not in self._names:
            hooks = user_hooks(self._trainer, _END_OF_EPOCH.get(step, ()))
            self._names[step] = {name for hook in hooks for name in names_in(hook, self._trainer)}
        if names := self._names[step]:
            module = self._trainer.lightning_module
            received = self._control.share_object(self._collected(module, names) if self._control.runs_step else None)
            if not self._control.runs_step:
                vars(module).update(pytree.tree_map_only(Tensor, self._here, received))

    def _collected(self, module: nn.Module, names: Set[str]) -> dict[str, Any]:
        own = {name: value for name, value in vars(module).items() if name in names - _OWN and _is_collected(value)}
        if (size := sum(map(_bytes, pytree.tree_leaves(own)))) > _MOST_BYTES:
            self._control.warn(
                f"Steps have collected {size >> 20} MiB in {', '.join(sorted(own))}, which hooks at the end of the "
                f"epoch read. More than {_MOST_BYTES >> 20} MiB are not sent to other ranks, which do not have them: "
                "keep what hooks need as a torchmetrics object, or log it."
            )
            return {}
        return pytree.tree_map_only(Tensor, _on_cpu, own)  # type: ignore[no-any-return]

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)


_END_OF_EPOCH: Final = {
    f"{step}_step": tuple(f"on_{loop}_{moment}" for moment in ("epoch_end", "end"))
    for step, loop in (("training", "train"), ("validation", "validation"), ("test", "test"))
}
_MOST_BYTES: Final = 64 << 20
_OWN: Final = OF_EVERY_MODULE | LIGHTNING_STATE


def _is_collected(value: Any) -> bool:
    if not isinstance(value, list | tuple | dict | deque):
        return isinstance(value, np.ndarray) or (isinstance(value, Tensor) and not value.is_meta)
    leaves = pytree.tree_leaves(value)
    return any(isinstance(leaf, Tensor | np.ndarray) for leaf in leaves) and all(
        isinstance(leaf, (*TOLD, Tensor, np.ndarray)) and not getattr(leaf, "is_meta", False) for leaf in leaves
    )


def _bytes(leaf: Any) -> int:
    return leaf.nbytes if isinstance(leaf, Tensor | np.ndarray) else 0


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
