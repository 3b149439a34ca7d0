"""A progress bar for searches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_gpp.reports.units import duration


@contextmanager
def search_progress(console: Console | None = None) -> Iterator[Callable[[float, float, float], None] | None]:
    """The `progress` argument of a search: moves a bar in the terminal; None without one."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("Searching for a plan"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def show(done: float, best: float, lower_bound: float) -> None:
            bar.update(task, completed=min(1.0, done), description=_state(best, lower_bound))

        yield show


def _state(best: float, lower_bound: float) -> str:
    """The best step time so far, and its lower bound (0: none), in seconds."""
    if not isfinite(best):
        return "no plan yet"
    bound = f", at best {duration(lower_bound)}" if lower_bound else ""
    return f"step {duration(best)}{bound}"
