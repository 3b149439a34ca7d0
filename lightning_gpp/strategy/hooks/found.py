"""The hooks that users have written, of the module and of callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import lightning.pytorch as pl

from lightning_gpp.user_code import user_function

LOOPS: Final = ("train", "validation", "test", "predict")
GRADIENTS: Final = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
"""Hooks in which gradients are complete."""


@dataclass(frozen=True, slots=True)
class UserHook:
    """A hook: its owner, name and bound method, and the function that the user has written."""

    owner: object
    name: str
    plain: Any
    function: Any


def owners_of(trainer: pl.Trainer) -> list[object]:
    """The callbacks, each once, and the module."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [*{id(callback): callback for callback in callbacks}.values(), trainer.lightning_module]


def user_hooks(trainer: pl.Trainer, names: Iterable[str], of: object = None) -> Iterator[UserHook]:
    """The hooks of these names, of all owners or of one."""
    known = tuple(names)
    for owner in owners_of(trainer) if of is None else [of]:
        for name in known:
            plain = getattr(owner, name, None)
            if (function := user_function(plain)) is not None:
                yield UserHook(owner, name, plain, function)
