"""The jobs of a sweep as a table: what each changed, and the metrics that it ended with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpp.reports.table import chosen, kept_columns

_RESULTS: Final = ("test/", "val/", "test_", "val_")
"""Beginnings of the names of metrics that judge a run, the most important first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptJob:
    """A job of a sweep that has ended well.

    Args:
        folder: its run folder.
        overrides: its `KEY=VALUE`.
        metrics: the last value of each logged metric.
        optimized: the metric that the sweep optimises; None if there is none.
    """

    folder: str
    overrides: Sequence[str]
    metrics: Mapping[str, float]
    optimized: str | None = None


def sweep_table(jobs: Sequence[SweptJob], width: int | None) -> str:
    """A row for each job; columns that do not fit the width are left out, the least important first."""
    keys = _changed(jobs)
    names = _judging(jobs)
    header = ["job", *keys, *names, "run folder"]
    rows = [_row(number, job, keys, names) for number, job in enumerate(jobs)]
    kept = kept_columns(header, rows, header, width)
    return "\n".join(chosen(header, rows, kept, width))


def _row(number: int, job: SweptJob, keys: Sequence[str], names: Sequence[str]) -> list[str]:
    metrics = (job.metrics.get(name) for name in names)
    results = ("" if value is None else f"{value:.5g}" for value in metrics)
    return [str(number), *(_values(job)[key] for key in keys), *results, job.folder]


def _values(job: SweptJob) -> dict[str, str]:
    return {key.lstrip("+"): value for key, _, value in (each.partition("=") for each in job.overrides)}


def _changed(jobs: Sequence[SweptJob]) -> list[str]:
    """The keys whose values differ between jobs."""
    values = [_values(job) for job in jobs]
    common = [key for key in values[0] if all(key in each for each in values)] if values else []
    return [key for key in common if len({each[key] for each in values}) > 1]


def _judging(jobs: Sequence[SweptJob]) -> list[str]:
    """The metrics that judge a run, the optimized one first; all if none does."""
    known = list(dict.fromkeys(name for job in jobs for name in job.metrics))
    judging = [name for begins in _RESULTS for name in known if name.startswith(begins)]
    optimized = [name for name in known if name == jobs[0].optimized]
    return list(dict.fromkeys([*optimized, *judging])) or known
