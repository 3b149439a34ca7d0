"""Lists and tensors that steps collect in attributes of the module, for hooks at the ends of epochs on every rank."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Set
from dataclasses import is_dataclass
from typing import Any, Final

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.attributes import TOLD, Attribute, dotted, is_plain
from lightning_gpp.strategy.hooks.found import names_in, user_hooks
from lightning_gpp.training.control import Control
from lightning_gpp.training.step_attributes import places, take_over

_END_OF_EPOCH: Final = {
    f"{step}_step": tuple(f"on_{loop}_{moment}" for moment in ("epoch_end", "end"))
    for step, loop in (("training", "train"), ("validation", "validation"), ("test", "test"))
}
_MOST_BYTES: Final = 64 << 20


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
                take_over(module, pytree.tree_map_only(Tensor, self._here, received), self._device)

    def _collected(self, module: nn.Module, names: Set[str]) -> dict[Attribute, Any]:
        found = {key: own[key[1]] for key, own in places(module, names) if _is_collected(own[key[1]])}
        if left := [key for key, value in found.items() if not _can_be_sent(value)]:
            self._control.warn(
                f"Steps have collected objects in {', '.join(map(dotted, left))}, which hooks at the end of the epoch "
                "read. Objects of classes inside of functions cannot be sent to other ranks, which do not have them: "
                "define the class in a module, or collect tuples and dictionaries."
            )
            found = {key: value for key, value in found.items() if key not in left}
        if (size := sum(map(_bytes, pytree.tree_leaves(found)))) > _MOST_BYTES:
            self._control.warn(
                f"Steps have collected {size >> 20} MiB in {', '.join(map(dotted, sorted(found)))}, which hooks at the "
                f"end of the epoch read. More than {_MOST_BYTES >> 20} MiB are not sent to other ranks, which do not "
                "have them: keep what hooks need as a torchmetrics object, or log it."
            )
            return {}
        return pytree.tree_map_only(Tensor, _on_cpu, found)  # type: ignore[no-any-return]

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)


def _is_collected(value: Any) -> bool:
    if not isinstance(value, list | tuple | dict | deque):
        return isinstance(value, np.ndarray) or (isinstance(value, Tensor) and not value.is_meta)
    if is_plain(value):  # sent with all else that steps change
        return False
    leaves = pytree.tree_leaves(value)
    return all(isinstance(leaf, (*TOLD, Tensor, np.ndarray)) or is_dataclass(leaf) for leaf in leaves) and not any(
        getattr(leaf, "is_meta", False) for leaf in leaves
    )


def _can_be_sent(value: Any) -> bool:
    """False for instances of classes that other processes cannot find."""
    try:
        return bool(pickle.dumps(pytree.tree_map_only(Tensor | np.ndarray, lambda _: 0, value)))
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def _bytes(leaf: Any) -> int:
    return leaf.nbytes if isinstance(leaf, Tensor | np.ndarray) else 0


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
