"""The width of the terminal, and lines that fit it."""

from __future__ import annotations

import shutil
import textwrap
from typing import Final

PIPE: Final = 100
"""Characters of a line if there is no terminal, and COLUMNS is not set."""

NARROWEST: Final = 60

_JOINT: Final = "\N{NO-BREAK SPACE}"


def terminal_width() -> int:
    """Characters of a line: COLUMNS, or those of the terminal."""
    return max(NARROWEST, shutil.get_terminal_size((PIPE, 24)).columns)


def together(text: str) -> str:
    """The text as one word for `wrapped`."""
    return text.replace(" ", _JOINT)


def wrapped(line: str, width: int, indent: int = 4) -> str:
    """The line, broken between words, but not before a per cent sign; further lines are indented."""
    line = line.replace(" %", f"{_JOINT}%")
    lines = textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace(_JOINT, " ")
