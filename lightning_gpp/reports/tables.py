"""Markdown tables that also line up as plain text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

TEXT: Final = ("stage", "modules", "partitioner", "schedule", "action", "holds")
"""Columns that begin at the left; all others are figures."""

ENDLESS: Final = 100_000


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """The table; in a terminal of `width` characters long cells are broken."""
    table = Table(box=box.MARKDOWN)
    for name in header:
        table.add_column(name, justify="left" if name in TEXT else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    plain = Console(
        file=io.StringIO(), width=width or ENDLESS, color_system=None, markup=False, emoji=False, highlight=False
    )
    with plain.capture() as capture:
        plain.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())
