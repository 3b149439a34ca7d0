"""Look-up of names that users give, with suggestions for misspelt ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from lightning_gpp.errors import ConfigError, did_you_mean

Named = TypeVar("Named")


def one_of(known: Mapping[str, Named], name: object, key: str, what: str) -> Named:
    """The entry with this name.

    Raises:
        ConfigError: there is none. Names the configuration key and the known names.
    """
    if isinstance(name, str) and name in known:
        return known[name]
    raise ConfigError(f"{key}={name!r}: there is no such {what}.{did_you_mean(name, known)}")
