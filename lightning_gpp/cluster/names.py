"""Looking up what a user named, with the names that come close if there is no such thing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from lightning_gpp.errors import ConfigError, did_you_mean

Named = TypeVar("Named")


def one_of(known: Mapping[str, Named], name: object, key: str, what: str) -> Named:
    """What is known by this name.

    Raises:
        ConfigError: nothing is; names the configuration's key and what is known.
    """
    if isinstance(name, str) and name in known:
        return known[name]
    raise ConfigError(f"{key}={name!r}: there is no such {what}.{did_you_mean(name, known)}")


def check_keys(given: Iterable[object], known: Iterable[str], key: str) -> None:
    """Raises ConfigError for the first key that is not known."""
    known = list(known)
    for name in given:
        if name not in known:
            raise ConfigError(f"{key}.{name} is not a setting.{did_you_mean(name, known)}")
