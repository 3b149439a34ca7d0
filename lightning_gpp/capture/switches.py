"""Switches that the step itself sets, outside of forwards: frozen parameters, modules in evaluation; and its draws.

Stages run on other ranks, which do not run the step. What a forward switches for itself is switched there. A step that
draws from a random generator of the module's before its last module call would draw twice, because its beginning runs
twice.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.generators import RandomSource, state_of
from lightning_gpp.capture.kept import kept_by
from lightning_gpp.capture.recording import Recording
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.wording import named

SwitchStates = dict[tuple[str, str], bool]
"""The flags `training` of modules and `requires_grad` of parameters, by path."""


class Switches:
    """Notes which flags of a module differ between its forwards.

    Args:
        module: the copy of the module on which the step runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._depth, self._switched = module, 0, dict[tuple[str, str], None]()
        for part in module.modules():
            if part is not module and not isinstance(part, torch.jit.ScriptModule):
                part.register_forward_pre_hook(self._enter)
                part.register_forward_hook(self._leave)
        self._generators = kept_by(module.modules()).generators
        self._states, self._draws = _states(self._generators), False
        self._before = _flags(module)

    def _enter(self, *_: Any) -> None:
        if self._depth == 0:
            self._compare()
            self._draws |= _states(self._generators) != self._states
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._before, self._states = _flags(self._module), _states(self._generators)

    def _compare(self) -> None:
        now = _flags(self._module)
        self._switched |= dict.fromkeys(key for key, flag in now.items() if self._before.get(key, flag) != flag)

    def _draws_by_torch(self, recording: Recording) -> bool:
        """True for calls of torch with such a generator, which without values leave its state as it is."""
        ends = max((call.first for call in recording.network_calls()), default=0)
        calls = [call for call in recording.calls[:ends] if call.scope == -1]
        given = pytree.tree_leaves([(call.args, call.kwargs) for call in calls])
        return any(leaf is generator for leaf in given for generator in self._generators)

    def refuse(self, step: str, recording: Recording) -> None:
        """Refuse a step that has switched something, at its end, or has drawn.

        Raises:
            CaptureError: it has.
        """
        if self._depth == 0:
            self._compare()
        if self._draws or self._draws_by_torch(recording):
            raise refusal(
                step,
                "it draws from a random generator that the module keeps, before its last call of a module, and this "
                "beginning runs twice for a micro-batch",
                "draw without a generator of your own (torch.rand, which strategy.seed starts); or let the step run as "
                "a whole (strategy.step=whole)",
            )
        if self._switched:
            (path, flag), *others = self._switched
            more = f" and {len(others)} more" if others else ""
            raise refusal(
                step,
                f"it changes {flag} of {named(path)}{more} for the forwards that follow, which run on other ranks",
                "do so in a hook, such as on_train_batch_start or on_train_epoch_start; or let the step run as a whole "
                "(strategy.step=whole)",
            )


def _flags(module: nn.Module) -> SwitchStates:
    """All flags, read in a way that a recording does not observe; scripted modules have no mode of their own."""
    modes = {(path, "training"): vars(part).get("training", True) for path, part in module.named_modules()}
    return modes | {(name, "requires_grad"): each.requires_grad for name, each in module.named_parameters()}


def _states(generators: Sequence[RandomSource]) -> list[bytes]:
    """The states of generators that draw in a recording, too, in which those of torch stay as they are."""
    return [pickle.dumps(state_of(each)) for each in generators if not isinstance(each, torch.Generator)]
