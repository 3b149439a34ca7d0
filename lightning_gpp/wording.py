"""Small parts of sentences for people: articles, numbers with nouns, names of modules."""

from __future__ import annotations

from collections.abc import Sequence


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
