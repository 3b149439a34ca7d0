"""Lines and tables that fit the terminal."""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

SEARCHING: Final = "Searching for a plan; strategy.search_seconds limits it"

PIPE: Final = 100
"""Characters of a line if there is no terminal, and COLUMNS is not set."""

NARROWEST: Final = 60

TEXT: Final = ("stage", "modules", "partitioner", "schedule", "action", "holds")
"""Columns that begin at the left; all others are figures."""

SPARE: Final = ("modules", "FLOPs", "samples", "parameters", "received", "sent", "search", "pipelines", "idle", "gap")
"""Columns that narrow terminals do not show, the least important first."""

ENDLESS: Final = 100_000

_JOINT: Final = "\N{NO-BREAK SPACE}"


def terminal_width() -> int:
    """Characters of a line: COLUMNS, or those of the terminal."""
    return max(NARROWEST, shutil.get_terminal_size((PIPE, 24)).columns)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Inside, a terminal shows what takes a while; nothing else does."""
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else nullcontext():
        yield


def together(text: str) -> str:
    """The text as one word for `wrapped`."""
    return text.replace(" ", _JOINT)


def wrapped(line: str, width: int, indent: int = 4) -> str:
    """The line, broken between words, but not before a per cent sign; further lines are indented."""
    line = line.replace(" %", f"{_JOINT}%")
    lines = textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace(_JOINT, " ")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """The table, in Markdown; in a terminal of `width` characters columns are left out, and then long cells broken."""
    columns = {name: [row[number] for row in rows] for number, name in enumerate(header)}
    needed = {name: max(map(len, (name, *cells))) + 3 for name, cells in columns.items()}
    for name in SPARE:
        if width and name in columns and sum(needed.values()) >= width:
            del columns[name], needed[name]
    table = Table(box=box.MARKDOWN)
    for name in columns:
        table.add_column(name, justify="left" if name in TEXT else "right", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    plain = Console(
        file=io.StringIO(), width=width or ENDLESS, color_system=None, markup=False, emoji=False, highlight=False
    )
    with plain.capture() as capture:
        plain.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())
