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
    _part: int = 0
    _num_parts: int = 1
    _name: str = ""

    def part(self, index: int, number: int, name: str) -> None:
        """Begin the `index`-th of `number` searches, the one for `name`."""
        self._part, self._num_parts, self._name = index, number, f"{name}: "
        self._show(0.0, "no plan yet")

    def __call__(self, done: float, best: float, lower_bound: float) -> None:
        self._show(min(1.0, done), _state(best, lower_bound))

    def _show(self, done: float, state: str) -> None:
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
        completed = (self._part + done) / self._num_parts
        self._bar.update(self._bar.task_ids[0], completed=completed, description=f"{self._name}{state}")

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
