"""Which code is the user's, and at which line of it a call was made."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Final

UNKNOWN: Final = "unknown line"
"""Stands for the line if there is none of the user's."""


def _folders(package: str) -> Sequence[str]:
    """The folders of a package, without importing it; none if it is not installed."""
    spec = find_spec(package)
    return (spec.submodule_search_locations if spec is not None else None) or ()


_PACKAGES = ("torch", "lightning", "torchmetrics", "hydra", "lightning_gpp")
_LIBRARY = (
    *(f"{folder}{os.sep}" for package in _PACKAGES for folder in _folders(package)),
    str(contextlib.__file__),
    "<",
)
"""Folders whose code is not the user's."""

_OWN = f"{os.path.dirname(__file__)}{os.sep}"


def user_line() -> str:
    """`file:line` of the innermost frame that is not library code."""
    frame = sys._getframe(2)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return UNKNOWN


def line_of(error: BaseException) -> str:
    """The innermost line of user code in the error's traceback."""
    entries = _user_entries(error)
    return f"{entries[-1].tb_frame.f_code.co_filename}:{entries[-1].tb_lineno}" if entries else UNKNOWN


def with_user_lines(error: BaseException) -> BaseException:
    """The error, with the user's lines alone in its traceback and in those of the errors before it that have any."""
    kept, hides, before = None, error.__suppress_context__, (error.__cause__, error.__context__)
    for entry in reversed(_user_entries(error)):
        kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    found = [None if each is None or line_of(each) == UNKNOWN else with_user_lines(each) for each in before]
    error.__cause__, error.__context__ = found
    error.__suppress_context__ = hides
    return error.with_traceback(kept)


def _user_entries(error: BaseException) -> Sequence[types.TracebackType]:
    """The entries of the error's traceback that are lines of the user."""
    entry, found = error.__traceback__, []
    while entry is not None:
        if is_user_code(entry.tb_frame.f_code.co_filename):
            found.append(entry)
        entry = entry.tb_next
    return found


def own_attributes(value: object) -> dict[str, Any] | None:
    """The attributes of an object; None for one without.

    It asks no `__getattr__`, which in proxies and lazy objects may do anything: import a package, raise any error.
    """
    try:
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes


def is_user_code(file: str) -> bool:
    return not file.startswith(_LIBRARY)


def user_function(value: object) -> types.FunctionType | None:
    """The function that the user has written behind a function, a method or a decorator; None if there is none."""
    while isinstance(value, types.FunctionType | types.MethodType):
        inner = getattr(value, "__wrapped__", None) or getattr(value, "__func__", None)
        if inner is None:
            return value if is_user_code(value.__code__.co_filename) else None  # type: ignore[return-value]
        value = inner
    return None


def is_own_code(file: str) -> bool:
    """True for a file of this library."""
    return file.startswith(_OWN)
