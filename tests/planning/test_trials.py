"""The best draft of an answer by its program: runners-up, and drafts that follow from the best by single changes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.planners.common import simulated
from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.planning import Answer, Draft, DraftStage, Prediction, Problem, Request, SearchControl
from lightning_gpp.planning.problem.prediction import best_trial
from tests.planning import graphs
from tests.planning.drafts import DEVICE


def problem_of() -> Problem:
    cluster = Cluster.uniform(DEVICE, 2, Link(latency=2e-3, bytes_per_second=1e9))
    return Request(cluster=cluster, batch_size=16, micro_batch_size=1, num_pipelines=1).problem(graphs.chain(4))


def cut(position: int, slack: int = 0) -> Draft:
    groups = (tuple(range(position)), tuple(range(position, 4)))
    stages = zip(groups, ((1,), (0,)), (slack, 0), strict=True)
    return Draft(
        stages=tuple(
            DraftStage(units=units, devices=devices, micro_batch_size=1, slack=more) for units, devices, more in stages
        )
    )


def neighbours(draft: Draft) -> Iterator[Draft]:
    position, slack = len(draft.stages[0].units), draft.stages[0].slack
    yield from (cut(other, slack) for other in (position - 1, position + 1) if 0 < other < 4)
    yield cut(position, slack + 1)


def answer(**settings: object) -> Answer:
    return Answer(draft=cut(1), states=1, **settings)  # type: ignore[arg-type]


def test_neighbours_improve_a_draft_until_none_is_faster() -> None:
    problem = problem_of()
    predict = partial(simulated, problem)
    draft, found = best_trial(problem, answer(neighbours=neighbours), predict, SearchControl())
    assert found.seconds == simulated(problem, draft).seconds
    assert found.seconds < simulated(problem, cut(1)).seconds
    assert len(draft.stages[0].units) == 2
    assert draft.stages[0].slack > 0
    assert all(simulated(problem, other).seconds >= found.seconds for other in neighbours(draft))


def test_only_the_best_draft_is_tried_if_the_search_is_over() -> None:
    problem, tried = problem_of(), list[Draft]()

    def predict(draft: Draft) -> Prediction:
        tried.append(draft)
        return simulated(problem, draft)

    best_trial(problem, answer(alternatives=(cut(2),), neighbours=neighbours), predict, SearchControl(seconds=0.0))
    assert tried == [cut(1)]
