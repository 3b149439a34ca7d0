"""Mini-batches and results of steps for the user's hooks, which run on every rank.

Both are on the rank that runs the step. If a hook of the user's takes them, the other ranks of the pipeline get them,
too, with small tensors: token ids and labels, not images. A large one stays where it is, and an error says so where it
is used. The loss of a training step is everywhere. Predictions stay where they are, as for writers: callbacks that take
them run their hooks of prediction only there, so that nothing is written twice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.replaced import Replaced
from lightning_gpp.strategy.data import Placeholder
from lightning_gpp.training.control import Control
from lightning_gpp.training.host import TRAINING
from lightning_gpp.user_code import user_function

BATCH: Final = "batch"
RESULT: Final = "result"
MOST_BYTES: Final = 1 << 20
"""Bytes of the largest tensor of a mini-batch, or of a result, that other ranks get."""

GRADIENTS: Final = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
"""Hooks in which gradients are complete."""

_LOOPS: Final = {TRAINING: "train", "validation_step": "validation", "test_step": "test"}
_AROUND: Final = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_before_zero_grad", *GRADIENTS),
    *("optimizer_step", "lr_scheduler_step"),
)
"""Methods around the mini-batches of training."""
_PREDICTION: Final = tuple(f"on_predict_{each}" for each in ("batch_start", "batch_end", "epoch_end", "end"))


@dataclass(frozen=True, slots=True)
class UserHook:
    """A hook that a user has written: its owner and name."""

    owner: object
    name: str


def owners_of(trainer: pl.Trainer) -> list[object]:
    """The callbacks, each once, and the module."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [*{id(callback): callback for callback in callbacks}.values(), trainer.lightning_module]


def user_hooks(trainer: pl.Trainer, names: Iterable[str], of: object = None) -> Iterator[UserHook]:
    """The hooks of these names, of all owners or of one."""
    known_names = tuple(names)
    for owner in owners_of(trainer) if of is None else [of]:
        for name in known_names:
            if user_function(getattr(owner, name, None)) is not None:
                yield UserHook(owner, name)


def packed(value: Any) -> Any:
    """A mini-batch or a result for other ranks, without its large tensors."""
    return pytree.tree_map_only(Tensor, _sent, value)


def _sent(tensor: Tensor) -> Tensor | Placeholder:
    if tensor.nbytes <= MOST_BYTES or not tensor.dim():
        return tensor.detach().cpu()
    return Placeholder(torch.empty(len(tensor), 0), tensor.nbytes)


class BatchReaders:
    """Gives all ranks of a pipeline the small mini-batches and results that the user's hooks take.

    Args:
        trainer: of the run.
        control: the side channel of this rank.
        device: the device of this rank.

    Attributes:
        taken: what hooks around the mini-batches of each step take: the mini-batch (`BATCH`), the result (`RESULT`).
        around: whether the user has hooks around the mini-batches of training.
    """

    def __init__(self, trainer: pl.Trainer, control: Control, device: torch.device) -> None:
        self._trainer, self._control, self._device = trainer, control, device
        self.taken: dict[str, set[str]] = {}
        self.around = False
        self._silenced = Replaced()

    def attach(self) -> None:
        """Agree on what is taken; silence hooks of prediction where there are no predictions. All ranks call this."""
        found = {step: set(self._taken_in(loop)) for step, loop in _LOOPS.items()}
        self.taken = self._control.broadcast(found)
        self.around = any(user_hooks(self._trainer, _AROUND))
        if not self._control.loads:
            for callback in owners_of(self._trainer)[:-1]:
                self._silence(callback)

    def detach(self) -> None:
        """Undo `attach`."""
        self.taken = {}
        self._silenced.restore()

    def _taken_in(self, loop: str) -> Iterator[str]:
        if any(user_hooks(self._trainer, [f"on_{loop}_batch_end"])):
            yield from (BATCH, RESULT)
        elif any(user_hooks(self._trainer, [f"on_{loop}_batch_start"])):
            yield BATCH

    def everywhere(self, batch: Any) -> Any:
        """A mini-batch of the rank that runs the step, which waits for nobody, on all ranks of its pipeline.

        Elsewhere than there, large tensors are placeholders.
        """
        mine = self._control.runs_step
        shared = self._control.share_object(packed(batch) if mine else None)
        return batch if mine else self.unpacked(shared)

    def unpacked(self, value: Any) -> Any:
        """The value that another rank has packed; large tensors are placeholders."""
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device), value)

    def _silence(self, callback: object) -> None:
        if isinstance(callback, BasePredictionWriter):
            names: tuple[str, ...] = ("write_on_batch_end", "write_on_epoch_end")
        else:
            names = _PREDICTION if any(user_hooks(self._trainer, ["on_predict_batch_end"], callback)) else ()
        for name in names:
            self._silenced.put(callback, name, _silent(getattr(callback, name)))


def _silent(hook: Any) -> Any:
    """Replaces a hook on ranks without predictions, where it would fail, or overwrite what others write."""

    @functools.wraps(getattr(hook, "__func__", hook))
    def nothing(*_: Any, **__: Any) -> None:
        pass

    return nothing
