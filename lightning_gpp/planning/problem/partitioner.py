"""Registry of partitioners. A partitioner is a function from a planning problem to the best draft that it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Final

from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.planning.problem.draft import Draft
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of a search.

    Args:
        draft: the best draft; None if none fits, with the reason in `notes`.
        objective: the value that the search minimised.
        states: partial or complete solutions visited.
        alternatives: drafts that lost, best first.
        tolerance: share of the time by which a draft with fewer stages may be slower than the fastest of all of these.
        bound: seconds that no draft can go below; 0 if the search knows none.
        neighbours: the drafts one change away from a draft, the most promising first, with which it may be improved by
            its program; None if the partitioner's draft is to stay as it is.
        notes: remarks for the user, one sentence each.
        seconds: of all searches for a request, once they are over.
    """

    draft: Draft | None
    objective: float = inf
    states: int
    alternatives: tuple[Draft, ...] = ()
    tolerance: float = 0.0
    bound: float = 0.0
    neighbours: Callable[[Draft], Iterator[Draft]] | None = field(default=None, compare=False, repr=False)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


EVALUATIONS_PER_SECOND: Final = 1_000
"""Drafts that a search evaluates for every second that it may take: a machine evaluates several times as many."""


@dataclass(slots=True, kw_only=True)
class SearchControl:
    """The limits of a search.

    A search ends after a number of evaluations, so that its answer depends neither on the speed nor on the load of the
    machine. Only if that takes longer than `seconds`, it ends earlier.

    Args:
        seconds: time after which an anytime search stops; it allows `EVALUATIONS_PER_SECOND` in each of them.
        whole: the search that this one is a part of.
    """

    seconds: float = 40.0
    whole: SearchControl | None = None
    began: float = field(default_factory=lambda: time.perf_counter())
    counted: float = 0.0

    @property
    def evaluations(self) -> float:
        """Number of evaluated drafts after which the search stops; what takes longer counts as several."""
        return EVALUATIONS_PER_SECOND * self.seconds

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    @property
    def expired(self) -> bool:
        over = self.elapsed >= self.seconds or self.counted >= self.evaluations
        return over or (self.whole is not None and self.whole.expired)

    def count(self, evaluations: float = 1.0) -> None:
        """Count evaluated drafts, here and in the whole search."""
        self.counted += evaluations
        if self.whole is not None:
            self.whole.count(evaluations)

    def part(self, share: float) -> SearchControl:
        """The limits of a part of the search: a share of all, as far as that is left."""
        return SearchControl(seconds=share * self.seconds, whole=self)


Partitioner = Callable[[Problem, SearchControl], Answer]

PARTITIONERS: Final[Registry[Partitioner]] = Registry(
    setting="strategy.partitioner", kind="partitioner", decorator="register_partitioner", error=ConfigError
)


def register_partitioner(name: str) -> Callable[[Partitioner], Partitioner]:
    """Make a partitioner available as `strategy.partitioner=name`.

    Raises:
        ConfigError: the name is taken.
    """

    return PARTITIONERS.adding(name, lambda partitioner: partitioner)


def partitioner_names() -> tuple[str, ...]:
    """All names that `strategy.partitioner` accepts."""
    return PARTITIONERS.names()


def partitioner_of(name: str) -> Partitioner:
    """The partitioner registered under a name.

    Raises:
        ConfigError: there is none.
    """
    return PARTITIONERS.get(name)


def checked(name: str, problem: Problem, answer: object) -> Answer:
    """The answer of a partitioner, perhaps a user's own, checked.

    Raises:
        PlanError: it is not an Answer, or its draft leaves out or repeats units, or repeats devices.
    """
    if not isinstance(answer, Answer):
        raise PlanError(f"The partitioner {name!r} returned {type(answer).__name__}; it must return an Answer.")
    stages = answer.draft.stages if answer.draft else ()
    units = sorted(unit for stage in stages for unit in stage.units)
    devices = sorted(device for stage in stages for device in stage.devices)
    twice = len(set(devices)) < len(devices) or not set(devices) <= set(range(problem.num_devices))
    if stages and (twice or units != list(range(problem.num_units))):
        raise PlanError(
            f"The partitioner {name!r} returned a draft with units {units} on devices {devices}; each unit from 0 to "
            f"{problem.num_units - 1} must be in one stage, each device from 0 to {problem.num_devices - 1} in one or "
            "in none."
        )
    return answer
