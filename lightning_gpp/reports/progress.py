"""A progress bar for long searches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_gpp.reports.units import duration

PATIENCE = 0.5
"""Seconds of a search before the bar appears."""


@dataclass(slots=True)
class SearchBar:
    """Called with the progress (0..1), the best step time so far, and its lower bound (0: none), in seconds."""

    console: Console
    patience: float = PATIENCE
    began: float = field(default_factory=time.perf_counter)
    _bar: Progress | None = None

    def __call__(self, done: float, best: float, lower_bound: float) -> None:
        if self._bar is None:
            if time.perf_counter() - self.began < self.patience:
                return
            self._bar = Progress(
                TextColumn("Searching for a plan"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            )
            self._bar.add_task("", total=1.0)
            self._bar.start()
        state = _state(best, lower_bound)
        self._bar.update(self._bar.task_ids[0], completed=min(1.0, done), description=state)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def _state(best: float, lower_bound: float) -> str:
    if not isfinite(best):
        return "no plan yet"
    bound = f", at best {duration(lower_bound)}" if lower_bound else ""
    return f"step {duration(best)}{bound}"


@contextmanager
def search_progress(console: Console | None = None) -> Iterator[SearchBar | None]:
    """The `progress` argument of a search: a bar, or None without a terminal."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    bar = SearchBar(console)
    try:
        yield bar
    finally:
        bar.stop()
