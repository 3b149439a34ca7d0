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

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from lightning_gpp.cluster import Cluster
from lightning_gpp.cluster.groups import num_processes
from lightning_gpp.errors import GPPError, PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.advice import advice
from lightning_gpp.planning.assignment.complete import completed, with_batch_size
from lightning_gpp.planning.assignment.layout import lay_out
from lightning_gpp.planning.problem.draft import Draft, realise
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.partitioner import (
    Alternative,
    Answer,
    SearchControl,
    checked,
    partitioner_of,
)
from lightning_gpp.planning.problem.prediction import Prediction, SearchFigures, Trial, best_trial, predicted
from lightning_gpp.planning.problem.problem import Problem, busy_bound
from lightning_gpp.planning.request import STANDARD, Candidate, Request, candidates, num_stages_per_device

ESTIMATES_SHARE: Final = 0.6
"""The share of a partitioner's search; the rest is for the programs of its best drafts."""


def best_plan(partitioner: str, graph: OperatorGraph, request: Request) -> Prediction:
    """The fastest plan that fits the memory, of all schedules and numbers of pipelines that the request allows.

    Raises:
        ConfigError: there is no such partitioner, or the request contradicts itself.
        PlanError: there is no plan; the message is for the first candidate, and suggests remedies.
    """
    return PlanSearch(partitioner, graph, request).best()


@dataclass(slots=True, kw_only=True)
class _AnsweredRequest:
    """A question, the partitioner's answer, and the trial of the first candidate with that question."""

    question: Request
    problem: Problem
    answer: Answer
    control: SearchControl
    seconds: float
    trial: Trial | None = None

    @property
    def has_plan(self) -> bool:
        return self.answer.draft is not None and Evaluator(self.problem)(self.answer.draft).fits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """A candidate and the trial of the best draft for it."""

    candidate: Candidate
    search: _AnsweredRequest
    trial: Trial

    @property
    def prediction(self) -> Prediction:
        return self.trial.prediction


class _NothingFits(PlanError):
    """The partitioner found no plan that fits. Its explanation takes trials of its own, so it is computed on demand."""

    def __init__(self, candidate: Candidate, search: _AnsweredRequest) -> None:
        super().__init__("No plan fits the devices.")
        self.candidate, self.search = candidate, search


class PlanSearch:
    """The loop over the candidates of one request, with the searches that they share; see the module."""

    def __init__(self, partitioner: str, graph: OperatorGraph, request: Request) -> None:
        self.name, self.partitioner = partitioner, partitioner_of(partitioner)
        self.graph, self.request, self.costs = graph, request, request.operator_costs(graph)
        self._searches: dict[Request, _AnsweredRequest | GPPError] = {}
        self._num_questions = max(1, len(set(_questions(request))))
        self._control = SearchControl(seconds=request.seconds, progress=request.progress)

    def best(self) -> Prediction:
        """See `best_plan`."""
        outcomes, failures = self._tried(self.request.schedules)
        if not outcomes:
            raise self._explanation(failures[0])
        return self._prediction(outcomes)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _tried(self, schedules: Iterable[str]) -> tuple[list[_Outcome], list[GPPError]]:
        """The candidates that have a plan, and the errors of the others."""
        outcomes, failures = list[_Outcome](), list[GPPError]()
        for schedule in schedules:
            try:
                for candidate in candidates(self.request, schedule):
                    self._try(candidate, outcomes, failures)
                    if outcomes and outcomes[-1].search.answer.interrupted:
                        return outcomes, failures
            except GPPError as error:
                failures.append(error)
        return outcomes, failures

    def _try(self, candidate: Candidate, outcomes: list[_Outcome], failures: list[GPPError]) -> None:
        try:
            search = self._search(candidate.question())
            trial = None if search.answer.draft is None else self._trial(candidate, search)
            if trial is None or not (trial.prediction.fits or search.has_plan):
                raise _NothingFits(candidate, search)
            outcomes.append(_Outcome(candidate=candidate, search=search, trial=trial))
        except GPPError as error:
            failures.append(error)

    def _search(self, question: Request) -> _AnsweredRequest:
        """The partitioner's answer to a question; each question is asked once."""
        if question not in self._searches:
            try:
                self._searches[question] = self._asked(question)
            except GPPError as error:
                self._searches[question] = error
        search = self._searches[question]
        if isinstance(search, GPPError):
            raise search
        return search

    def _asked(self, question: Request) -> _AnsweredRequest:
        problem = question.problem(self.graph)
        control = self._control.part(1 / self._num_questions)
        answer = checked(self.name, problem, self.partitioner(problem, control.part(ESTIMATES_SHARE)))
        return _AnsweredRequest(
            question=question,
            problem=problem,
            answer=refitted(problem, answer),
            control=control,
            seconds=control.elapsed,
        )

    def _trial(self, candidate: Candidate, search: _AnsweredRequest) -> Trial:
        def predict(draft: Draft) -> Prediction:
            return self._predict(candidate, search.problem, draft)

        if search.trial is None:
            search.trial = best_trial(search.problem, search.answer, predict, search.control)
            return search.trial
        return replace(search.trial, prediction=predict(search.trial.draft))

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
        plan = replace(plan, notes={"partitioner": self.name})
        number *= candidate.num_pipelines or 1
        _check_number(plan, number, request.cluster)
        return predicted(
            plan,
            self.graph,
            request.cluster,
            self.costs,
            request.footprint,
            number,
            weight_copies=request.weight_copies,
        )

    # -- the outcome --------------------------------------------------------------------------------------------------

    def _prediction(self, outcomes: Sequence[_Outcome]) -> Prediction:
        """The prediction of the best outcome, with its lower bound, the plans that lost, and the effort."""
        best = min(outcomes, key=lambda outcome: outcome.prediction.rank)
        answer, interrupted = best.search.answer, any(outcome.search.answer.interrupted for outcome in outcomes)
        searches = {id(outcome.search): outcome.search for outcome in outcomes}.values()
        remark = device_remark(best.prediction, self.request)
        return replace(
            best.prediction,
            plan=with_remark(best.prediction.plan, remark),
            lower_bound=self._lower_bound(outcomes),
            alternatives=(*_lost(outcomes, best), *_alternatives(best)),
            search=SearchFigures(
                partitioner=self.name,
                draft=best.trial.draft,
                objective=answer.objective / best.search.problem.num_slices,
                objective_name=_objective_name(best),
                states=answer.states,
                seconds=sum(search.seconds for search in searches),
                notes=(*answer.notes, *filter(None, [remark])),
                interrupted=interrupted,
            ),
        )

    def _lower_bound(self, outcomes: Sequence[_Outcome]) -> float:
        """Seconds that no plan of these candidates can go below; 0 for slices, for which no bound is known."""
        return 0.0 if self.request.slicing is not None else min(map(_busy_bound, outcomes))

    def _explanation(self, error: GPPError) -> GPPError:
        """The error, extended by the reason why nothing fits, and remedies."""
        if not isinstance(error, _NothingFits):
            return error
        search = error.search
        notes = (f"The partitioner {self.name!r} found no plan.", *search.answer.notes)
        reason = advice(search.problem, search.answer.draft)
        return PlanError(_layout_hint(error.candidate, search) + " ".join((*notes, reason)))


def refitted(problem: Problem, answer: Answer) -> Answer:
    """The answer with the cheapest measures that its draft needs, if the partitioner chose others.

    Partitioners of the literature recompute whole stages, or all.
    """
    if answer.draft is None or problem.recompute is not None:
        return answer
    evaluate = Evaluator(problem)
    stages = tuple(replace(stage, recompute=None, offload=False) for stage in answer.draft.stages)
    draft = evaluate.fitted(replace(answer.draft, stages=stages))
    return replace(answer, draft=draft) if evaluate(draft).rank <= evaluate(answer.draft).rank else answer


def _questions(request: Request) -> Iterator[Request]:
    for schedule in request.schedules:
        with suppress(GPPError):
            for candidate in candidates(request, schedule):
                with suppress(GPPError):
                    yield candidate.question()


def _busy_bound(outcome: _Outcome) -> float:
    """The time of a step in which all devices of the plan are always busy."""
    problem = outcome.search.problem
    return problem.num_devices / outcome.candidate.num_devices * busy_bound(problem)


def _layout_hint(candidate: Candidate, search: _AnsweredRequest) -> str:
    if not candidate.has_own_layout:
        return ""
    number = num_stages_per_device(candidate.request, candidate.schedule)
    return (
        f"strategy.schedule={candidate.schedule!r} with {number} stages on each of {candidate.num_devices} devices "
        f"needs {search.problem.num_devices} stages. Choose fewer (strategy.stages_per_device), or fewer devices. With "
        "that many stages there is no plan: "
    )


def _objective_name(outcome: _Outcome) -> str:
    name = outcome.search.answer.objective_name
    return name if outcome.candidate.is_searched else f"{name} of the stages as {STANDARD}"


def _alternatives(outcome: _Outcome) -> Iterator[Alternative]:
    """The other drafts of the search, if they are for the same devices and samples as the plan."""
    if not outcome.candidate.has_own_layout:
        scale = outcome.search.problem.num_slices
        yield from (replace(entry, seconds=entry.seconds / scale) for entry in outcome.trial.alternatives)


def _lost(outcomes: Sequence[_Outcome], best: _Outcome) -> Iterator[Alternative]:
    """The best plan of every other schedule, and those of the same schedule with other numbers of pipelines."""
    ranked = sorted(outcomes, key=lambda outcome: outcome.prediction.rank)
    first = {outcome.candidate.schedule: outcome for outcome in reversed(ranked)}
    for outcome in ranked:
        schedule = outcome.candidate.schedule
        if outcome is not best and (schedule == best.candidate.schedule or outcome is first[schedule]):
            draft = replace(outcome.trial.draft, schedule=schedule)
            yield Alternative(draft=draft, seconds=outcome.prediction.seconds, reason=_reason(outcome, best))


def _reason(outcome: _Outcome, best: _Outcome) -> str:
    same = outcome.candidate.schedule == best.candidate.schedule
    what = f"with strategy.num_pipelines={outcome.prediction.num_pipelines}" if same else ""
    return ", ".join(filter(None, (what, "needs more memory" * (not outcome.prediction.fits))))


def _check_number(plan: Plan, number: int, cluster: Cluster) -> None:
    """Refuse drafts that a schedule's own layout spreads over more devices than there are."""
    if plan.num_processes * number > num_processes(cluster):
        raise PlanError(
            f"schedule={plan.schedule} lays this draft out on {plan.num_devices} devices per pipeline, so {number} "
            f"pipelines need {plan.num_devices * number}; the cluster {cluster.name!r} has {cluster.num_devices}."
        )


def best_order(plan: Plan, graph: OperatorGraph, request: Request, num_pipelines: int = 1) -> Prediction:
    """The user's stages under the fastest of the request's schedules that fits the memory.

    Raises:
        GPPError: none of them can order the stages; the error is that of the first.
    """
    costs, failures, predictions = request.operator_costs(graph), list[GPPError](), list[Prediction]()
    for schedule in request.schedules:
        scheduled = replace(plan, schedule=schedule)
        try:
            predictions.append(
                predicted(
                    scheduled,
                    graph,
                    request.cluster,
                    costs,
                    request.footprint,
                    num_pipelines,
                    weight_copies=request.weight_copies,
                )
            )
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
    idle = everything - number
    if idle:
        verb = "is" if idle == 1 else "are"
        return f"{idle} of {everything} devices {verb} idle: no plan that uses all of them was found to be faster."
    return _data_parallel(prediction.plan, number)


def _data_parallel(plan: Plan, number: int) -> str:
    stages = [stage for stage in plan.stages if stage.modules != (STEP,)]
    if number == 1 or len(stages) > 1:
        return ""
    return (
        "All devices share one stage: for this model data parallelism alone is estimated to be fastest. "
        "strategy.max_replicas=1 makes a pipeline with one stage per device."
    )


def with_remark(plan: Plan, remark: str) -> Plan:
    """The plan with the remark in its notes."""
    return replace(plan, notes={**plan.notes, REMARK: remark}) if remark else plan
