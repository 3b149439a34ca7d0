"""Values that the training step keeps in attributes, and hooks read: with micro-batches they are those of the last."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from itertools import pairwise
from typing import Any, Final

import lightning.pytorch as pl
from torch import Tensor

from lightning_gpp._compat.torch import version
from lightning_gpp.capture.attributes import MOST_ITEMS, Attribute, dotted, same_contents
from lightning_gpp.hook_code import names_only_set
from lightning_gpp.strategy.hooks.found import DECIDING, hooks_on_events, names_in, user_hooks
from lightning_gpp.training.control import Control

LOOKED_AT: Final = 3
"""Mini-batches whose tensors are compared, which waits for the device."""


class UnlikeValues:
    """Finds attributes whose values differ from one micro-batch of a mini-batch to the next.

    What the step computes from the samples does so, and what it changes in each call; a factor that follows from the
    number of the mini-batch does not, and is that of one process.
    """

    def __init__(self) -> None:
        self._noted: dict[int, list[dict[Attribute, Any]]] = {}
        self._mini_batches = 0

    def begin(self, batch: int, values: Mapping[Attribute, Any]) -> None:
        """Note the dictionaries before a mini-batch, of which each micro-batch may set the entries of its samples."""
        if batch not in self._noted:
            self.note(batch, {key: value for key, value in values.items() if isinstance(value, dict)}, 0)

    def note(self, batch: int, values: Mapping[Attribute, Any], num_samples: int) -> None:
        """Note the values after a micro-batch of `num_samples` of the mini-batch of this number."""
        with_tensors = self._mini_batches < LOOKED_AT
        compared = {key: _comparable(value, num_samples, with_tensors) for key, value in values.items()}
        noted = {key: value for key, value in compared.items() if value is not None}
        self._noted.setdefault(batch, []).append(noted)

    def forget(self, batches: Iterable[int]) -> None:
        """Drop what is noted of these mini-batches."""
        for batch in batches:
            self._noted.pop(batch, None)

    def of(self, batch: int) -> set[Attribute]:
        """The attributes that differ between micro-batches of this mini-batch, which are dropped."""
        noted = self._noted.pop(batch, [])
        self._mini_batches += len(noted) > 1
        pairs = [
            (key, before[key], value) for before, now in pairwise(noted) for key, value in now.items() if key in before
        ]
        changed = Counter(name for key, before, value in pairs for name in _changed(key, before, value))
        return {key for (key, entry), number in changed.items() if number > 1 or entry is None}


def _comparable(value: Any, num_samples: int, with_tensors: bool) -> Any:
    """The part of a value that tells micro-batches apart; None for values that may add up to that of the mini-batch."""
    if isinstance(value, dict):
        return {name: item for name, item in value.items() if _is_no_count(item)} or None
    if not isinstance(value, Tensor):
        return value if _is_no_count(value) else None
    per_sample = num_samples > 1 and value.shape[:1] == (num_samples,)
    if not with_tensors or not (per_sample or value.is_floating_point()):
        return None
    return value.detach().clone() if value.numel() <= MOST_ITEMS else (weakref.ref(value), version(value))


def _is_no_count(value: Any) -> bool:
    return isinstance(value, float) and not value.is_integer()


def _changed(key: Attribute, before: Any, now: Any) -> list[tuple[Attribute, Any]]:
    """The attribute if it has changed, or the entries of a dictionary that have."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [(key, name) for name in now if name not in before or before[name] != now[name]]
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        same = before.shape == now.shape and bool((before == now).all())
    else:
        same = same_contents(before, now)
    return [] if same else [(key, None)]


class ReadByHooks:
    """Warns of hooks that read what the step has changed on a part of the mini-batch, on the rank that runs it."""

    def __init__(self, trainer: pl.Trainer, control: Control) -> None:
        self._trainer, self._control = trainer, control
        self._told: set[Attribute] = set()
        self._read: tuple[dict[str, str], dict[str, str]] | None = None

    def tell(self, changed: Mapping[Attribute, Any], unlike: Set[Attribute]) -> None:
        """Warn of each attribute once, if the step runs on several micro-batches.

        Args:
            changed: what the step has changed in the mini-batch; hooks that act on training should not decide by it.
            unlike: what differs between its micro-batches; no hook should read it.
        """
        if self._read is None:
            self._read = self._names_in(DECIDING), self._names_in(hooks_on_events(self._trainer))
        acting, others = self._read
        for key in sorted({key for key, value in changed.items() if _may_be_a_mean(value)} | unlike):
            name = key[1].rpartition(".")[2]
            reader = acting.get(name) or (others.get(name) if key in unlike else None)
            if reader is not None and key not in self._told:
                self._told.add(key)
                self._control.warn(
                    f"training_step sets {dotted(key)}, and {reader} reads it: the step runs once per micro-batch, so "
                    "that the value is that of the last micro-batch (a sum has an item for each), and not that of the "
                    "mini-batch. Where it has to be that of the mini-batch, let the step run as a whole "
                    "(strategy.step=whole)."
                )

    def _names_in(self, hooks: Iterable[str]) -> dict[str, str]:
        """The names in the code of hooks, each with the hook that has it."""
        return {
            name: f"{type(hook.owner).__name__}.{hook.name}"
            for hook in user_hooks(self._trainer, hooks)
            for name in names_in(hook, self._trainer) - names_only_set(hook.function)
        }


def _may_be_a_mean(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_may_be_a_mean, value.values()))
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
