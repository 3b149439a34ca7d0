"""Attributes that steps and forwards change on the ranks that run them, for what reads them on all ranks.

A training step's own rank sends them with its logs. What forwards change in their stages, and what steps of evaluation
change, is gathered before hooks that name such an attribute in their code, and at the ends of epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Final

import lightning.pytorch as pl
import torch

from lightning_gpp.capture.attributes import Attribute
from lightning_gpp.capture.outside import OUTSIDE
from lightning_gpp.capture.places import outside_of_steps
from lightning_gpp.strategy.hooks.found import DECIDING, LOOPS, hooks_on_events, names_in, user_hooks
from lightning_gpp.strategy.hooks.kept import UnlikeValues
from lightning_gpp.strategy.hooks.module_hooks import KeepingHooks
from lightning_gpp.training.control import Control
from lightning_gpp.training.planner import TRAINING
from lightning_gpp.training.step_attributes import (
    NOT_USERS,
    StepAttributes,
    is_named,
    places_in_parts,
    present,
    take_over,
)

_AROUND: Final = tuple(f"on_{loop}_batch_{moment}" for loop in LOOPS for moment in ("start", "end"))


class AttributesForHooks:
    """Notes what a step changes on this rank, and shares what hooks name.

    Args:
        trainer: of the run.
        control: the side channel of this rank.
        device: the device of this rank.

    Attributes:
        unlike: finds what differs between micro-batches.
    """

    def __init__(self, trainer: pl.Trainer, control: Control, device: torch.device) -> None:
        self._trainer, self._control, self._device = trainer, control, device
        self._names: frozenset[str] = frozenset()
        self._changed: set[Attribute] = set()
        self._watched: StepAttributes | None = None
        self._on_modules: KeepingHooks | None = None
        self.unlike = UnlikeValues()

    def attach(self) -> None:
        """Find the names in hooks."""
        self._names = self._named({*hooks_on_events(self._trainer), *DECIDING})
        self._on_modules = KeepingHooks(self._trainer, self._control)
        self._watch()

    def _watch(self) -> None:
        """Watch the module where the step runs, and everywhere its parts with attributes that hooks name."""
        module, own = self._trainer.lightning_module, self._control.runs_step
        watched = own or places_in_parts(module, self._names)
        places = outside_of_steps(module) if own else []
        self._watched = StepAttributes(module, own=own, of_parts=self._names, outside=places) if watched else None

    def detach(self) -> None:
        """Undo `attach`."""
        self._names, self._changed, self._watched, self._on_modules = frozenset(), set(), None, None

    def _named(self, hooks: Set[str]) -> frozenset[str]:
        found = user_hooks(self._trainer, sorted(hooks))
        return frozenset[str]().union(*(names_in(hook, self._trainer) for hook in found))

    def read_around(self, loop: str) -> bool:
        """True if hooks around the mini-batches of a loop name attributes that no message of a step has."""
        module, trains = self._trainer.lightning_module, loop == "train"
        names = self._named({*(name for name in _AROUND if f"_{loop}_" in name), *(DECIDING if trains else ())})
        own = vars(module).keys() - NOT_USERS
        return bool(places_in_parts(module, names)) or not (trains or names.isdisjoint(own))

    def _sends(self, step: str) -> bool:
        """True if this rank sends what a step has changed right after it."""
        return step == TRAINING and self._control.runs_step

    def begin(self, step: str) -> None:
        """Warn of hooks on modules whose values are not shared. All ranks call this before each step."""
        if self._on_modules is not None:
            self._on_modules.begin(step)

    def note(self, step: str) -> None:
        """Note the present values, before a step."""
        if self._watched is not None and (self._names or self._sends(step)):
            self._watched.note()

    def begin_training(self, batch: int) -> None:
        """Note the present values before the training step runs on a mini-batch."""
        self.note(TRAINING)
        if self._watched is not None and self._names:
            self.unlike.begin(batch, self._watched.named(self._names))

    def note_micro_batch(self, batch: int, num_samples: int) -> None:
        """Note the values that hooks name, after the training step has run on a micro-batch of this mini-batch."""
        if self._watched is not None and self._names:
            self.unlike.note(batch, self._watched.named(self._names), num_samples)

    def changed(self, step: str) -> Mapping[Attribute, Any]:
        """The changes that this rank has to send after the step. All others here are noted for `share`."""
        if self._watched is None or not (self._names or self._sends(step)):
            return {}
        changed = self._watched.changed()
        if self._sends(step):
            return changed
        self._changed |= {key for key in changed if key[0].startswith(OUTSIDE) or is_named(key, self._names)}
        return {}

    def share(self) -> None:
        """Give all ranks of the pipeline the present values of what was noted. All of them call this together.

        The present ones, because hooks may have set others on all ranks since.
        """
        module, mine = self._trainer.lightning_module, self._changed
        gathered: list[dict[Attribute, Any]] = self._control.gather_in_pipeline(present(module, mine))
        shared = {key: value for values in reversed(gathered) for key, value in values.items()}  # the step's count most
        own = mine if self._control.runs_step else set()
        take_over(module, {key: value for key, value in shared.items() if key not in own}, self._device)
        self._changed = set()

    def end_epoch(self) -> None:
        """Share, and look for further attributes that parts have got. All ranks of the pipeline call this together."""
        self.share()
        self._watch()
