"""Predictions of a run: a plan, one simulated mini-batch, and its quality.

A draft is tried by making its timed plan and simulating the program that would run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from lightning_gpp.cluster import Cluster
from lightning_gpp.cluster.groups import grouped, num_processes
from lightning_gpp.costs.model import CostModel, Footprint
from lightning_gpp.errors import GPPError, ScheduleError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import Plan
from lightning_gpp.planning.assignment.estimate import estimate, timed
from lightning_gpp.planning.problem.draft import Draft, unreplicated
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.schedules import compile_program, in_flight
from lightning_gpp.simulation import (
    Period,
    Timeline,
    WeightCopies,
    simulate,
    simulate_period,
    simulate_streaming,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A plan, one simulated mini-batch, and its quality.

    Args:
        plan: the plan of one pipeline replica.
        num_pipelines: pipeline replicas that share the work.
        timeline: simulated mini-batch of one pipeline, with the collectives of all pipelines.
        memory_bytes: memory limit of every device of the pipeline; empty if unknown.
        lower_bound: seconds that no plan can go below; 0 if none are known.
        search: the answer with the plan's draft; None if the user gave the stages.
        note: a remark to show below tables.
        period: the steady state of a pipeline that does not flush; None if it flushes.
    """

    plan: Plan
    num_pipelines: int = 1
    timeline: Timeline
    memory_bytes: tuple[float, ...] = ()
    lower_bound: float = 0.0
    search: Answer | None = None
    note: str = ""
    period: Period | None = None

    @property
    def used_devices(self) -> int:
        """Number of devices of all pipelines that have a stage, with all members."""
        used = self.plan.num_devices - len(self.plan.unused)
        return self.num_pipelines * used * self.plan.tensor_parallel_size

    @property
    def seconds(self) -> float:
        """Step time; without a flush the period."""
        return self.timeline.makespan if self.period is None else self.period.seconds

    @property
    def drawn(self) -> Timeline:
        """The timeline to show: a mini-batch, or without a flush some, from an empty pipeline to an empty one."""
        return self.timeline if self.period is None else self.period.timeline

    @property
    def in_flight(self) -> Mapping[int, int]:
        """The most micro-batches in flight on a replica of every stage."""
        return in_flight(self.plan) if self.period is None else self.drawn.peak_in_flight

    @property
    def idle_fractions(self) -> tuple[float, ...]:
        """Fraction of the step, or of the period, in which every device does not compute."""
        return self.timeline.bubble_fractions if self.period is None else self.period.idle_fractions

    @property
    def idle(self) -> float:
        """Mean of these fractions."""
        return sum(self.idle_fractions) / max(1, len(self.idle_fractions))

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak memory of every device."""
        return tuple(self.drawn.peak_bytes)

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
        pairs = zip(self.peak_bytes, self.memory_bytes, strict=False)
        return max((0.0, *(peak - limit for peak, limit in pairs)))

    @property
    def fits(self) -> bool:
        """True if no device exceeds its memory limit."""
        return not self.excess_bytes

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, best first: excess bytes, then seconds per sample."""
        return self.excess_bytes, 1 / self.samples_per_second


NUM_RUNNERS_UP: Final = 9
"""Runners-up of a search that are simulated beside its best draft."""

NUM_STARTS: Final = 3
"""Drafts, of different numbers of stages, whose neighbours are simulated."""

RUNNERS_UP_SHARE, CLIMB_SHARE = 0.3, 0.2
"""Shares of the evaluations for the runners-up, and for the neighbours of one start."""

EVALUATIONS_PER_OPERATOR, EVALUATIONS_PER_ACTION = 0.2, 0.8
"""The number of evaluations that take as long as making the program of a plan, and simulating it."""

STEPS_UNTIL_STEADY: Final = 10
"""Steps that take as long to simulate as a pipeline without a flush, which is simulated until it is steady."""


Trial = tuple[Draft, Prediction]
"""A draft and the prediction for its plan."""


def predicted(
    plan: Plan,
    graph: OperatorGraph,
    cluster: Cluster,
    costs: CostModel,
    footprint: Footprint,
    num_pipelines: int = 1,
    *,
    weight_copies: WeightCopies | None = None,
) -> Prediction:
    """Time the actions and messages of a plan, and simulate its program.

    Args:
        plan: the plan of one pipeline.
        graph: the operator graph that the plan was made from.
        cluster: device d of pipeline p is its device p x plan.num_devices + d; if devices of the plan have several
            members, these are its devices, one after the other, or it has groups of them.
        costs: seconds of operators.
        footprint: what a device keeps per byte of parameters; without training, forwards are simulated.
        num_pipelines: pipeline replicas.
        weight_copies: copies of a stage's weights by its delay, without a flush; None: the pipeline flushes.

    Raises:
        PlanError: the plan's schedule cannot order its stages.
        ScheduleError: it has no steady state, and the pipeline does not flush.
    """
    stage_costs = estimate(graph, plan, cluster, costs, footprint=footprint, num_pipelines=num_pipelines)
    limits = memory_limits(plan, cluster)
    plan = timed(plan, stage_costs, limits)
    timeline = simulate(compile_program(plan, training=footprint.training, copies=num_pipelines), stage_costs)
    notes = {"cluster": cluster.name, "simulated_step": f"{timeline.makespan:.6g} s"}
    plan = replace(plan, notes={**plan.notes, **notes})
    prediction = Prediction(plan=plan, num_pipelines=num_pipelines, timeline=timeline, memory_bytes=limits)
    if weight_copies is None:
        return prediction
    if not footprint.training:
        with suppress(ScheduleError):  # such stages flush
            prediction = replace(prediction, period=simulate_streaming(plan, stage_costs))
        return prediction
    return replace(prediction, period=simulate_period(plan, stage_costs, num_pipelines, weight_copies))


def memory_limits(plan: Plan, cluster: Cluster) -> tuple[float, ...]:
    """The memory of every device of a pipeline: the least over all pipelines that the cluster has devices for."""
    pipelines = max(1, num_processes(cluster) // plan.num_processes)
    limits = [float(device.memory_bytes) for device in grouped(cluster, plan.tensor_parallel_size).devices]
    whole = limits[: pipelines * plan.num_devices]
    return tuple(min(whole[device :: plan.num_devices]) for device in range(plan.num_devices))


def best_trial(
    problem: Problem, answer: Answer, predict: Callable[[Draft], Prediction], control: SearchControl
) -> Trial:
    """The best of an answer's drafts, judged by their programs.

    A program shows what the estimate of a search leaves out: messages that share a port, the order of collectives, the
    user's step.

    Args:
        problem: the question.
        answer: an answer with a draft, which is tried in any case.
        predict: simulates a draft.
        control: the limits for all others.

    Raises:
        GPPError: none of the drafts can become a plan; the error is that of the search's best draft.
    """
    trials = _Trials(problem, answer, predict)
    if answer.draft is not None:
        trials.add(answer.draft, control)
    trials.add_runners_up(control.part(RUNNERS_UP_SHARE))
    if not trials.known:
        raise trials.failures[0]
    trials.improve(control)
    return _chosen(answer, list(trials.known.items()))


@dataclass(slots=True)
class _Trials:
    """The drafts whose programs were simulated, and the errors of those that have none."""

    problem: Problem
    answer: Answer
    predict: Callable[[Draft], Prediction]
    known: dict[Draft, Prediction] = field(default_factory=dict)
    tried: set[Draft] = field(default_factory=set)
    failures: list[GPPError] = field(default_factory=list)

    def add(self, draft: Draft, control: SearchControl) -> None:
        if draft in self.tried:
            return
        self.tried.add(draft)
        control.count(_evaluations(self.problem, draft))
        try:
            self.known[draft] = self.predict(draft)
        except GPPError as error:
            self.failures.append(error)

    def add_runners_up(self, control: SearchControl) -> None:
        """Simulate the best alternatives of the search."""
        for draft in self.answer.alternatives[:NUM_RUNNERS_UP]:
            if control.expired or self.enough:
                return
            self.add(draft, control)

    def improve(self, control: SearchControl) -> None:
        """Add drafts that follow from the best ones by changes that shorten their programs, and those tried on the way.

        Estimates leave out some waiting, most where latencies rule, so the best estimate need not have the best
        program.
        """
        if self.answer.neighbours is None:
            return
        starts: dict[int, Draft] = {}
        for draft in sorted(self.known, key=self._rank):
            starts.setdefault(len(draft.stages), draft)
        for start in list(starts.values())[:NUM_STARTS]:
            self._climb(self.answer.neighbours, start, control.part(CLIMB_SHARE))

    @property
    def enough(self) -> bool:
        """True if a program takes hardly longer than any can; on one device nothing waits, so estimates hold."""
        least = inf if self.problem.num_devices == 1 else self.answer.bound
        return any(entry.fits and entry.seconds <= least for entry in self.known.values())

    def _rank(self, draft: Draft) -> tuple[float, float]:
        return self.known[draft].rank

    def _climb(self, neighbours: Callable[[Draft], Iterator[Draft]], best: Draft, control: SearchControl) -> None:
        """Simulate neighbours of the best draft until none is faster."""
        waiting = neighbours(best)
        while not (control.expired or self.enough) and (draft := next(waiting, None)) is not None:
            is_new = draft not in self.tried
            self.add(draft, control)
            if is_new and draft in self.known and self._rank(draft) < self._rank(best):
                best = draft
                waiting = neighbours(best)


def _chosen(answer: Answer, predictions: Sequence[Trial]) -> Trial:
    """The one with the fewest stages of those that are nearly as fast as the fastest."""
    excess, seconds = min(prediction.rank for _, prediction in predictions)
    limit = excess, seconds * (1 + answer.tolerance)
    near = [entry for entry in predictions if entry[1].rank <= limit]
    return min(near, key=lambda entry: (len(entry[0].stages) if answer.tolerance else 0, entry[1].rank))


def _evaluations(problem: Problem, draft: Draft) -> float:
    """The number of evaluations by an estimate that take as long as making and simulating a draft's program."""
    actions = num_actions(problem, draft)
    return EVALUATIONS_PER_OPERATOR * len(problem.graph) + EVALUATIONS_PER_ACTION * actions


def num_actions(problem: Problem, draft: Draft) -> int:
    """Actions on all devices of one pipeline that are simulated for a draft; the time that this takes grows with them.

    Without a flush these are the actions of several steps.
    """
    pipelines = unreplicated(problem, draft)[1] if problem.replicable else 1
    actions = sum(2 * len(stage.devices) * -(-problem.batch_size // stage.micro_batch_size) for stage in draft.stages)
    return actions * (STEPS_UNTIL_STEADY if problem.continuous else 1) // pipelines
