"""Hooks that users register on modules, and that keep values: they run in stages, and what they keep stays there."""

from __future__ import annotations

import dis
import functools
import sysconfig
import types
from collections.abc import Iterator
from typing import Any, Final

import lightning.pytorch as pl
from torch import nn

from lightning_gpp._compat.torch import hooks_of
from lightning_gpp.hook_code import names_in_hook
from lightning_gpp.training.control import Control
from lightning_gpp.user_code import user_function
from lightning_gpp.wording import named, some

_KEEPING: Final = frozenset(
    {
        *("add", "append", "appendleft", "extend", "insert", "setdefault", "update"),
        *("log", "log_dict", "add_scalar", "add_histogram"),
    }
)
"""Methods of containers, metrics and loggers."""
_STORING: Final = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF")
_INSTALLED: Final = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


class KeepingHooks:
    """Warns of users' hooks on modules that keep or log values.

    Args:
        trainer: of the run.
        control: the side channel of this rank.
    """

    def __init__(self, trainer: pl.Trainer, control: Control) -> None:
        self._trainer, self._control = trainer, control
        self._told: set[tuple[str, str]] = set()
        self._began: tuple[str, int] | None = None

    def begin(self, step: str) -> None:
        """Warn of new ones, before the first mini-batch of a loop's epoch."""
        if self._began != (step, self._trainer.current_epoch):
            self._began = step, self._trainer.current_epoch
            self._warn()

    def _warn(self) -> None:
        module = self._trainer.lightning_module
        found = dict.fromkeys(keeping_hooks(module))
        new = [each for each in found if each not in self._told]
        if new:
            self._told.update(new)
            lines = ", ".join(dict.fromkeys(line for line, _ in new))
            paths = some(list(dict.fromkeys(named(path) for _, path in new)))
            self._control.warn(
                f"Hooks on modules keep or log values ({lines}; on {paths}). They run with the stages of these "
                "modules: in other processes, for each micro-batch, and not at all on a module that is cut. So what "
                "they keep is incomplete where it is read. Return such values from the module's forward, and keep "
                "or log them in the step."
            )


def keeping_hooks(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The lines of users' hooks that keep values, with the paths of the modules that they are registered on."""
    for path, part in module.named_modules():
        for hook in hooks_of(part):
            function = _function_of(hook)
            if function is not None and not function.__code__.co_filename.startswith(_INSTALLED) and _keeps(function):
                yield f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}", path


def _function_of(hook: Any) -> types.FunctionType | None:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return user_function(hook if isinstance(hook, types.FunctionType | types.MethodType) else type(hook).__call__)


@functools.lru_cache(maxsize=1024)
def _keeps(function: types.FunctionType) -> bool:
    """True if a hook may change something besides its own variables and the module that it is called with."""
    return not _KEEPING.isdisjoint(names_in_hook(function, ())) or any(map(_stores, _codes(function.__code__)))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _stores(code: types.CodeType) -> bool:
    instructions = list(dis.get_instructions(code))
    module = code.co_varnames[:2] if code.co_varnames[:1] == ("self",) else code.co_varnames[:1]
    for before, each in zip(instructions, instructions[1:], strict=False):
        if each.opname in _STORING:
            own = each.opname == "STORE_DEREF" and each.argval not in code.co_freevars
            in_module = each.opname == "STORE_ATTR" and before.argval in module and before.argval != "self"
            if not (own or in_module):
                return True
    return False
