"""The registry: implementations under the names that a setting of the strategy accepts; users add their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lightning_gpp.errors import GPPError

Implementation = TypeVar("Implementation")
Decorated = TypeVar("Decorated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry(Generic[Implementation]):
    """Implementations by name.

    Args:
        setting: key of the configuration that takes a name, such as "strategy.schedule".
        kind: the word for an entry in messages, such as "schedule".
        decorator: public name of the function that registers an entry.
        error: raised for a name that is unknown, or taken.
        built_in: names that the setting accepts without an entry.
        entries: the implementations.
    """

    setting: str
    kind: str
    decorator: str
    error: type[GPPError]
    built_in: tuple[str, ...] = ()
    entries: dict[str, Implementation] = field(default_factory=dict)

    def adding(self, name: str, entry: Callable[[Decorated], Implementation]) -> Callable[[Decorated], Decorated]:
        """A decorator that registers the result of `entry` for the decorated object, which it does not change."""

        def add(decorated: Decorated) -> Decorated:
            if name in (*self.entries, *self.built_in):
                raise self.error(f"A {self.kind} named {name!r} is registered already; choose another name.")
            self.entries[name] = entry(decorated)
            return decorated

        return add

    def names(self) -> tuple[str, ...]:
        """All registered names, in alphabetical order."""
        return tuple(sorted(self.entries))

    def get(self, name: str) -> Implementation:
        """The implementation with this name; if there is none, raises an error that lists the names."""
        if name not in self.entries:
            allowed = ", ".join((*self.built_in, *self.names()))
            raise self.error(
                f"{self.setting}={name!r} is not a {self.kind}. Choose one of: {allowed} (or one that "
                f"@lightning_gpp.{self.decorator} has added)."
            )
        return self.entries[name]
