"""Attributes of users' objects that are replaced during a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

Around = Callable[[], AbstractContextManager[None]]
"""Makes a context."""

_NOTHING: Final = object()


class Replaced:
    """Puts attributes into objects, and restores what was there: nothing, or what the user has put there."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def put(self, owner: object, name: str, value: Any) -> None:
        """Put an attribute into an object itself, in front of that of its class."""
        self._before.append((owner, name, vars(owner).get(name, _NOTHING)))
        vars(owner)[name] = value

    def surround(self, owner: object, name: str, around: Around) -> None:
        """Let a method of an object run inside a context, which is made for each call."""
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def method(*args: Any, **kwargs: Any) -> Any:
            with around():
                return plain(*args, **kwargs)

        self.put(owner, name, method)

    def restore(self) -> None:
        """Undo all of it, the last one first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _NOTHING:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = value


@contextmanager
def replaced(owner: object, name: str, value: Any) -> Iterator[None]:
    """Inside, an object has another attribute."""
    attributes = Replaced()
    attributes.put(owner, name, value)
    try:
        yield
    finally:
        attributes.restore()
