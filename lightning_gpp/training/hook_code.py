"""The names that the user's hooks mention in their code, without running them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_gpp.user_code import is_user_code

_HOOKS = ("setup", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward")


def names_in_hooks(owners: Sequence[object], helpers: Sequence[object]) -> set[str]:
    """The names of attributes and functions in hooks, and in the methods that these call.

    Args:
        owners: a module and callbacks, whose hooks count.
        helpers: objects whose methods may be called there.
    """
    kinds: list[type] = list(dict.fromkeys(type(each) for each in (*owners, *helpers)))
    hooks = [(type(owner), name) for owner in owners for name in dir(type(owner)) if _is_hook(name)]
    open_codes = [code for kind, name in hooks for code in _codes(kind, name)]
    names, seen = set[str](), set[types.CodeType]()
    while open_codes:
        code = open_codes.pop()
        if code not in seen:
            seen.add(code)
            new = set(code.co_names) - names
            names |= new
            open_codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            open_codes += [found for name in new for kind in kinds for found in _codes(kind, name)]
    return names


def _is_hook(name: str) -> bool:
    return name.startswith("on_") or name in _HOOKS


def _codes(kind: type, name: str) -> Iterator[types.CodeType]:
    """The code of a method, if the user has written it."""
    function: Any = inspect.unwrap(getattr(kind, name, None))  # type: ignore[arg-type]
    if isinstance(function, types.FunctionType) and is_user_code(function.__code__.co_filename):
        yield function.__code__
