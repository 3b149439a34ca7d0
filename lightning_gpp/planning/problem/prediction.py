"""The prediction of a run: a plan, one simulated mini-batch of it, and how good that is."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.plan import Plan
from lightning_gpp.planning.problem.answer import Alternative
from lightning_gpp.planning.problem.draft import Draft
from lightning_gpp.simulation import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFigures:
    """The search that found a plan.

    Args:
        partitioner: name.
        draft: of the plan.
        objective: value that the partitioner minimized.
        objective_name: meaning and unit of the objective.
        states: partial or complete solutions visited.
        seconds: duration of all searches for the request, without the lower bound.
        notes: sentences for the user.
        interrupted: the user ended the search.
        bound_seconds: duration of computing the lower bound.
    """

    partitioner: str
    draft: Draft
    objective: float
    objective_name: str
    states: int
    seconds: float
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    bound_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A plan, one simulated mini-batch of it, and how good that is.

    Args:
        plan: of one pipeline replica.
        num_pipelines: pipeline replicas that share the work.
        timeline: simulated mini-batch of one pipeline, with the collectives of all pipelines.
        memory_bytes: memory limit of every device of the pipeline; empty if unknown.
        lower_bound: seconds that no plan under the schedule can go below; 0 if none is known.
        alternatives: runners-up of the search.
        search: how the plan was found; None if the user gave it.
        note: a remark to show below tables.
    """

    plan: Plan
    num_pipelines: int = 1
    timeline: Timeline
    memory_bytes: tuple[float, ...] = ()
    lower_bound: float = 0.0
    alternatives: tuple[Alternative, ...] = ()
    search: SearchFigures | None = None
    note: str = ""

    @property
    def seconds(self) -> float:
        """Step time."""
        return self.timeline.makespan

    @property
    def samples_per_second(self) -> float:
        """Throughput of all pipelines."""
        return self.plan.batch_size * self.num_pipelines / self.seconds

    @property
    def gap(self) -> float | None:
        """Distance of the step time from the lower bound, as a fraction of the bound; None without a bound."""
        return max(0.0, self.seconds / self.lower_bound - 1) if self.lower_bound else None

    @property
    def excess_bytes(self) -> float:
        """Bytes by which the worst device exceeds its memory limit; 0 if all fit."""
        pairs = zip(self.timeline.peak_bytes, self.memory_bytes, strict=False)
        return max((0.0, *(peak - limit for peak, limit in pairs)))

    @property
    def fits(self) -> bool:
        """True if no device exceeds its memory limit."""
        return not self.excess_bytes

    @property
    def rank(self) -> tuple[float, float]:
        """The order of preference, least first: bytes that do not fit, then seconds per sample."""
        return self.excess_bytes, 1 / self.samples_per_second
