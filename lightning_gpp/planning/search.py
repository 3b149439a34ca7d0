"""The front of planning: one loop over the candidates of a request that keeps the best plan.

    for each schedule and number of pipelines      `candidates`
        search       drafts by a partitioner; candidates with the same question share a search
        lay out      a plan of one pipeline: stages on devices, sharding, slices
        time         seconds of its actions and messages, memory left for activations
        simulate     the program that would run
    keep the plan that fits and has the highest throughput

The first candidate of a question also tries the runners-up of the search (`best_trial`); the others take the draft that
it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from lightning_gpp.cluster.groups import num_processes
from lightning_gpp.errors import GPPError, PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.advice import advice
from lightning_gpp.planning.assignment.complete import completed, with_batch_size
from lightning_gpp.planning.assignment.layout import lay_out
from lightning_gpp.planning.problem.draft import Draft, realise
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl, checked, partitioner_of
from lightning_gpp.planning.problem.prediction import Prediction, Trial, best_trial, predicted
from lightning_gpp.planning.problem.problem import Problem, busy_bound
from lightning_gpp.planning.request import Candidate, Request, candidates, num_stages_per_device

ESTIMATES_SHARE: Final = 0.6
"""The share of a partitioner's search; the rest is for the programs of its best drafts."""


def best_plan(partitioner: str, graph: OperatorGraph, request: Request) -> Prediction:
    """The fastest plan that fits the memory, of all schedules and numbers of pipelines that the request allows.

    Raises:
        ConfigError: there is no such partitioner, or the request contradicts itself.
        PlanError: there is no plan; the message is for the first candidate, and suggests remedies.
    """
    return PlanSearch(partitioner, graph, request).best()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A candidate whose best draft fits."""

    candidate: Candidate
    problem: Problem
    answer: Answer
    draft: Draft
    prediction: Prediction


class PlanSearch:
    """The loop over the candidates of one request, with the searches that they share; see the module."""

    def __init__(self, partitioner: str, graph: OperatorGraph, request: Request) -> None:
        self.name, self.partitioner = partitioner, partitioner_of(partitioner)
        self.graph, self.request, self.costs = graph, request, request.operator_costs(graph)
        self._control = SearchControl(seconds=request.seconds)
        self._outcomes, self._failures, self._seconds = list[_Outcome](), list[GPPError | Callable[[], GPPError]](), 0.0

    def best(self) -> Prediction:
        """See `best_plan`."""
        questions = self._questions()
        for question, group in questions.items():
            with self._noted():
                self._ask(question, group, self._control.part(1 / len(questions)))
        if not self._outcomes:
            first = self._failures[0]
            raise first if isinstance(first, GPPError) else first()
        return self._prediction(min(self._outcomes, key=lambda outcome: outcome.prediction.rank))

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep an error: it is the user's only if there is no plan."""
        try:
            yield
        except GPPError as error:
            self._failures.append(error)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _questions(self) -> dict[Request, list[Candidate]]:
        """The candidates by the question that they share."""
        found: dict[Request, list[Candidate]] = {}
        for schedule in self.request.schedules:
            with self._noted():
                for candidate in candidates(self.request, schedule):
                    with self._noted():
                        found.setdefault(candidate.question(), []).append(candidate)
        return found

    def _ask(self, question: Request, group: Sequence[Candidate], control: SearchControl) -> None:
        problem = question.problem(self.graph)
        found = self.partitioner(problem, control.part(ESTIMATES_SHARE))
        answer = refitted(problem, checked(self.name, problem, found))
        trial: Trial | None = None
        self._seconds += control.elapsed
        for candidate in group:
            predict = partial(self._predict, candidate, problem)
            with self._noted():
                if trial is not None:
                    trial = trial[0], predict(trial[0])
                elif answer.draft is not None:
                    trial = best_trial(problem, answer, predict, control)
                if trial is None or not trial[1].fits:
                    self._failures.append(partial(self._explanation, candidate, problem, answer, trial))
                else:
                    self._outcomes.append(_Outcome(candidate, problem, answer, *trial))

    def _predict(self, candidate: Candidate, problem: Problem, draft: Draft) -> Prediction:
        """Lay out, time and simulate."""
        request = self.request
        draft = replace(Evaluator(problem).fitted(draft), schedule=candidate.schedule)
        plan, number = realise(problem, draft, request.model)
        if candidate.has_own_layout:
            plan = lay_out(plan, self.graph, candidate.num_devices)
        plan = completed(
            with_batch_size(plan, plan.batch_size // problem.num_slices),
            self.graph,
            recompute=request.recompute,
            offload=None if request.offload == "auto" else request.offload,
            sharding=request.sharding,
            chained=request.chained,
            slicing=request.slicing,
        )
        return self._simulated(replace(plan, notes={"partitioner": self.name}), number * (candidate.num_pipelines or 1))

    def _simulated(self, plan: Plan, number: int) -> Prediction:
        """The prediction for a plan of so many pipelines, unless a schedule's own layout needs too many devices."""
        request, cluster = self.request, self.request.cluster
        if plan.num_processes * number > num_processes(cluster):
            raise PlanError(
                f"schedule={plan.schedule} lays this draft out on {plan.num_devices} devices per pipeline, so {number} "
                f"pipelines need {plan.num_devices * number}; the cluster {cluster.name!r} has {cluster.num_devices}."
            )
        copies = request.weight_copies
        return predicted(plan, self.graph, cluster, self.costs, request.footprint, number, weight_copies=copies)

    # -- the outcome --------------------------------------------------------------------------------------------------

    def _prediction(self, best: _Outcome) -> Prediction:
        """The prediction of the best outcome, with its lower bound and the effort."""
        answer, remark = best.answer, device_remark(best.prediction, self.request)
        plan = best.prediction.plan
        return replace(
            best.prediction,
            plan=replace(plan, notes={**plan.notes, REMARK: remark}) if remark else plan,
            lower_bound=self._lower_bound(),
            search=replace(
                answer,
                draft=best.draft,
                objective=answer.objective / best.problem.num_slices,
                notes=(*answer.notes, *filter(None, [remark])),
                alternatives=(),
                neighbours=None,
                seconds=self._seconds,
            ),
        )

    def _lower_bound(self) -> float:
        """Seconds that no plan of these candidates can go below, as devices are never more than busy; 0 for slices."""
        if self.request.slicing is not None:
            return 0.0
        return min(
            outcome.problem.num_devices / outcome.candidate.num_devices * busy_bound(outcome.problem)
            for outcome in self._outcomes
        )

    def _explanation(self, candidate: Candidate, problem: Problem, answer: Answer, trial: Trial | None) -> PlanError:
        """The reason why nothing fits, and remedies."""
        reason = advice(problem, partial(self._predict, candidate, problem), trial and trial[1])
        notes = (f"The partitioner {self.name!r} found no plan.", *answer.notes, reason)
        return PlanError(_layout_hint(candidate, problem) + " ".join(notes))


def refitted(problem: Problem, answer: Answer) -> Answer:
    """The answer with the cheapest measures that its draft needs, if the partitioner chose others.

    Partitioners of the literature recompute whole stages, or all.
    """
    if answer.draft is None or problem.recompute is not None:
        return answer
    evaluate = Evaluator(problem)
    draft = evaluate.fitted(answer.draft.opened())
    return replace(answer, draft=draft) if evaluate(draft).rank <= evaluate(answer.draft).rank else answer


def _layout_hint(candidate: Candidate, problem: Problem) -> str:
    if not candidate.has_own_layout:
        return ""
    number = num_stages_per_device(candidate.request, candidate.schedule)
    return (
        f"strategy.schedule={candidate.schedule!r} with {number} stages on each of {candidate.num_devices} devices "
        f"needs {problem.num_devices} stages. Choose fewer (strategy.stages_per_device), or fewer devices. "
        "With that many stages there is no plan: "
    )


def best_order(plan: Plan, graph: OperatorGraph, request: Request) -> Prediction:
    """The user's stages under the fastest of the request's schedules that fits the memory.

    Raises:
        GPPError: none of them can order the stages; the error is that of the first.
    """
    costs, failures, predictions = request.operator_costs(graph), list[GPPError](), list[Prediction]()
    for schedule in request.schedules:
        scheduled = replace(plan, schedule=schedule)
        try:
            cluster, footprint, copies = request.cluster, request.footprint, request.weight_copies
            predictions.append(predicted(scheduled, graph, cluster, costs, footprint, weight_copies=copies))
        except GPPError as error:
            failures.append(error)
    if not predictions:
        raise failures[0]
    return min(predictions, key=lambda prediction: prediction.rank)


# -- the remark on devices --------------------------------------------------------------------------------------------

REMARK: Final = "devices"
"""The key of the remark in a plan's notes."""


def device_remark(prediction: Prediction, request: Request) -> str:
    """A sentence on the devices if the plan leaves some idle, or is no pipeline; otherwise empty."""
    number, everything = prediction.used_devices, num_processes(request.cluster)
    if idle := everything - number:
        verb = "is" if idle == 1 else "are"
        return f"{idle} of {everything} devices {verb} idle: no plan that uses all of them was found to be faster."
    stages = [stage for stage in prediction.plan.stages if stage.modules != (STEP,)]
    if number == 1 or len(stages) > 1:
        return ""
    return (
        "All devices share one stage: for this model data parallelism alone is estimated to be fastest. "
        "strategy.max_replicas=1 makes a pipeline with one stage per device."
    )
