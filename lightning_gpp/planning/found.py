"""From a request to a plan: search, realise, and simulate the program that would run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_gpp.cluster import Cluster
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import Plan
from lightning_gpp.planning.advice import advice
from lightning_gpp.planning.bounds.bound import busy_bound, lower_bound
from lightning_gpp.planning.problem.answer import Alternative, Answer, Control
from lightning_gpp.planning.problem.draft import Draft
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.registry import partitioner_of
from lightning_gpp.planning.problem.trial import num_actions, tried
from lightning_gpp.planning.request import Request
from lightning_gpp.simulation import Timeline

NUM_TRIALS, MARGIN, MAX_ACTIONS = 6, 1.1, 40_000
"""How many runner-up drafts may be compared by their programs, how far behind, and up to which size in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan, what it is expected to do, and how it was found.

    Args:
        partitioner: its name.
        plan: of one pipeline.
        num_pipelines: copies of the pipeline that share the mini-batch.
        timeline: simulated, of one pipeline, with the sums of gradients over all of them.
        memory_bytes: limit of every device of the pipeline, the least of all copies.
        search_seconds: what the search took.
        answer: of the partitioner.
        busy_seconds: of the step if all devices were busy all the time, which no schedule beats.
    """

    partitioner: str
    plan: Plan
    num_pipelines: int
    timeline: Timeline
    memory_bytes: tuple[float, ...]
    search_seconds: float
    answer: Answer
    busy_seconds: float

    @property
    def seconds(self) -> float:
        """Of the whole step, simulated."""
        return self.timeline.makespan

    @property
    def samples_per_second(self) -> float:
        return self.plan.batch_size * self.num_pipelines / self.seconds

    @property
    def gap(self) -> float | None:
        """By how much the step may exceed the best possible one, as a fraction of the latter; None if not known."""
        bound = self.answer.lower_bound
        return max(0.0, self.seconds / bound - 1) if bound else None

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        return self.answer.alternatives

    @property
    def fits(self) -> bool:
        return all(peak <= limit for peak, limit in zip(self.timeline.peak_bytes, self.memory_bytes, strict=True))


def partition(name: str, graph: OperatorGraph, request: Request) -> Found:
    """A plan by the partitioner of that name.

    Raises:
        ConfigError: there is no such partitioner, or the micro-batches do not fit the mini-batch.
        PlanError: the model does not fit the devices; the message says by how much, and what would help.
    """
    partitioner, problem = partitioner_of(name), request.problem(graph)
    control = Control(seconds=request.seconds, progress=request.progress)
    answer = checked(name, problem, partitioner(problem, control))
    elapsed = control.elapsed
    if answer.draft is None or not Evaluator(problem)(answer.draft).fits:
        notes = [f"The partitioner {name!r} found no plan.", *answer.notes, advice(problem, answer.draft)]
        raise PlanError(" ".join(notes))
    return judged(name, problem, settled(problem, answer), elapsed, request.model)


def checked(name: str, problem: Problem, answer: object) -> Answer:
    """What a partitioner, perhaps a user's own, returned.

    Raises:
        PlanError: it is no answer, or its draft leaves out or repeats units or devices.
    """
    if not isinstance(answer, Answer):
        raise PlanError(f"The partitioner {name!r} returned {type(answer).__name__}; it must return an Answer.")
    stages = answer.draft.stages if answer.draft else ()
    for what, found, number in (
        ("unit", [unit for stage in stages for unit in stage.units], problem.num_units),
        ("device", [device for stage in stages for device in stage.devices], problem.num_devices),
    ):
        if answer.draft and sorted(found) != list(range(number)):
            raise PlanError(
                f"The partitioner {name!r} returned a draft with {what}s {sorted(found)}; each {what} from 0 to "
                f"{number - 1} must be in one stage."
            )
    return answer


def settled(problem: Problem, answer: Answer) -> Answer:
    """The answer with the best of its drafts by their whole programs, as far as runner-ups may still win.

    Programs tell more than a search can look at each time: the messages that share a port, the user's step.
    """
    draft = answer.draft
    if draft is None or num_actions(problem, draft) * (1 + NUM_TRIALS) > MAX_ACTIONS:
        return answer
    first = best = _rank(problem, draft)
    winner: Alternative | None = None
    for entry in sorted(answer.alternatives, key=lambda entry: entry.seconds)[:NUM_TRIALS]:
        if entry.seconds < MARGIN * best[1] and (rank := _rank(problem, entry.draft)) < best:
            best, winner = rank, entry
    if winner is None:
        return answer
    reason = "its program takes longer than its estimate" if first[0] <= best[0] else "needs more memory"
    loser = Alternative(draft=draft, seconds=first[1], reason=reason)
    others = tuple(entry for entry in answer.alternatives if entry is not winner)
    return replace(answer, draft=winner.draft, alternatives=(loser, *others))


def _rank(problem: Problem, draft: Draft) -> tuple[float, float]:
    """Bytes beyond a device's memory, and seconds of the step."""
    plan, _, timeline = tried(problem, draft)
    limits = problem.memory_bytes[: plan.num_devices]
    excess = max(peak - limit for peak, limit in zip(timeline.peak_bytes, limits, strict=True))
    return max(0.0, float(excess)), timeline.makespan


def judged(name: str, problem: Problem, answer: Answer, search_seconds: float, model: str = "") -> Found:
    """The plan of an answer's draft, with the simulation of its program."""
    if answer.draft is None:
        raise PlanError(f"The partitioner {name!r} found no plan. {' '.join(answer.notes)}")
    plan, copies, timeline = tried(problem, answer.draft, model)
    answer = replace(answer, lower_bound=answer.lower_bound or lower_bound(problem))
    plan = replace(plan, notes={**plan.notes, **notes_of(name, problem.cluster, timeline.makespan)})
    return Found(
        partitioner=name,
        plan=plan,
        num_pipelines=copies,
        timeline=timeline,
        memory_bytes=tuple(float(problem.memory_bytes[d :: plan.num_devices].min()) for d in range(plan.num_devices)),
        search_seconds=search_seconds,
        answer=answer,
        busy_seconds=busy_bound(problem),
    )


def notes_of(name: str, cluster: Cluster, seconds: float) -> dict[str, str]:
    """What the plan file remembers of its origin."""
    return {"partitioner": name, "cluster": cluster.name, "simulated_step": f"{seconds:.6g} s"}
