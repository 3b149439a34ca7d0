"""Small parts of sentences for people: articles, numbers with nouns, names of modules, settings."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Final

import yaml

from lightning_gpp.explained import named_at_end

WORDS: Final = "LIGHTNING_GPP_WORDS"
"""The environment variable that says `hydra` in processes of the commands, for messages before Hydra has started."""
_VALUE: Final = r"'[^']*'|\{[^}]*\}|\[[^]]*\]|[\w.+:-]*\w"
_SETTING: Final = re.compile(rf"(?<![\w.])strategy\.([a-z_]+)(?:=({_VALUE}))?(?![\w(])")


def spoken(text: str) -> str:
    """A message in the words of its reader.

    Messages name settings as Hydra's command line does: `strategy.step=whole`. Who has written `GPPStrategy(...)` in
    Python reads `GPPStrategy(step="whole")`.
    """
    config = getattr(sys.modules.get("hydra.core.hydra_config"), "HydraConfig", None)
    if os.environ.get(WORDS) == "hydra" or (config is not None and config.initialized()):
        return text
    return _SETTING.sub(_in_python, text).replace(", or null", ", or None")


def warn(text: str, stacklevel: int = 2) -> None:
    """Warn the user, in the words of the reader; the warning has the place of the caller's caller."""
    warnings.warn(named_at_end(spoken(text)), stacklevel=stacklevel + 1)


def _in_python(setting: re.Match[str]) -> str:
    name, value = setting.groups()
    return f"GPPStrategy's {name}" if value is None else f"GPPStrategy({name}={_literal(value)})"


def _literal(value: str) -> str:
    try:
        return repr(yaml.safe_load(value)).replace("'", '"')
    except yaml.YAMLError:  # a placeholder
        return value


def with_article(noun: str) -> str:
    """The noun with "a", or with "an" before a vowel."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def named(path: str) -> str:
    """The path of a module in quotes; "the module" if it is empty."""
    return repr(path) if path else "the module"


def sentence(text: object) -> str:
    """The text with one full stop at its end."""
    return f"{str(text).rstrip('.')}."


def described(error: BaseException) -> str:
    """The name of the error's class, and its message if it has one."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def counted(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
