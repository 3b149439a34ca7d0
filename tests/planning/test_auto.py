"""The default partitioner against every plan of small problems, the other partitioners, and its own promises."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.planners.common import simulated
from lightning_gpp.cluster import Cluster, Link, Node
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning import (
    Answer,
    Draft,
    Evaluator,
    Problem,
    Request,
    SearchControl,
)
from lightning_gpp.planning.partitioners.auto.search import auto
from lightning_gpp.planning.problem.problem import busy_bound
from lightning_gpp.schedules import compile_program, verify
from tests.planning import graphs
from tests.planning.drafts import DEVICE

FAMILIES = {
    "chain": graphs.chain,
    "two_towers": graphs.two_towers,
    "feature_towers": graphs.feature_towers,
    "encoder_decoder": graphs.encoder_decoder,
    "unet": graphs.unet,
    "gpt": graphs.gpt,
}
LINK = Link(latency=1e-4, bytes_per_second=1e6)
SECONDS = 30.0
"""Far more than these searches take: they end by themselves, so that no load of the machine changes their results."""


def _control() -> SearchControl:
    return SearchControl(seconds=SECONDS)


def _problem(graph: OperatorGraph, num_devices: int = 4, **options: object) -> Problem:
    settings: dict[str, object] = {"cluster": Cluster.uniform(DEVICE, num_devices, LINK), "batch_size": 24, **options}
    return Request(**settings).problem(graph)  # type: ignore[arg-type]


def _draft(answer: Answer) -> Draft:
    assert answer.draft is not None
    return answer.draft


def _assert_valid(problem: Problem, draft: Draft) -> None:
    """Every unit once, every device once, the step on device 0 and not computed twice, replicas within their limit."""
    assert sorted(unit for stage in draft.stages for unit in stage.units) == list(range(problem.num_units))
    assert sorted(device for stage in draft.stages for device in stage.devices) == list(range(problem.num_devices))
    step = next(stage for stage in draft.stages if problem.num_units - 1 in stage.units)
    assert 0 in step.devices
    assert not step.recompute
    assert max(len(stage.devices) for stage in draft.stages) <= problem.max_replicas
    assert {stage.micro_batch_size for stage in draft.stages} <= set(problem.sizes)
    assert draft.schedule in problem.schedules
    if problem.recompute is not None:
        assert all(stage.recompute == problem.recompute for stage in draft.stages if stage is not step)


@pytest.mark.parametrize("family", list(FAMILIES.values()), ids=list(FAMILIES))
@pytest.mark.parametrize("recompute", [None, True, False])
def test_plans_compile_and_take_what_was_promised(family: Callable[[], OperatorGraph], recompute: bool | None) -> None:
    """All that the draft does not know are messages with data, and a step on one device of several."""
    problem = _problem(family(), 3, micro_batch_size=4, recompute=recompute)
    answer = auto(problem, _control())
    draft = _draft(answer)
    _assert_valid(problem, draft)
    prediction = simulated(problem, draft)
    verify(compile_program(prediction.plan))
    assert answer.objective == Evaluator(problem)(draft).seconds
    assert busy_bound(problem) <= answer.objective
    assert prediction.seconds == pytest.approx(answer.objective, rel=0.2)


def test_little_time_gives_a_plan() -> None:
    problem = _problem(graphs.encoder_decoder(), 4)
    _assert_valid(problem, _draft(auto(problem, SearchControl(seconds=0.05))))


class _Clock:
    """A clock that goes on by the same time whenever it is read."""

    def __init__(self, step: float) -> None:
        self.step, self.now = step, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_search_ends_after_its_evaluations_however_fast_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, answers = _problem(graphs.encoder_decoder(), 4), list[Answer]()
    for step in (0.0, 1e-6):
        monkeypatch.setattr(time, "perf_counter", _Clock(step))
        control = SearchControl(seconds=2.0)
        answers.append(auto(problem, control))
        assert 0.8 * control.evaluations < control.counted < 1.5 * control.evaluations
    assert answers[0] == answers[1]


def test_a_slow_device_gets_less_work() -> None:
    slow = replace(DEVICE, name="slow", peak_flops={"float32": 2.5e8}, peak_bytes_per_second=2.5e8)
    cluster = Cluster.of_nodes(
        "mixed", [Node(device=DEVICE, count=1, link=LINK), Node(device=slow, count=1, link=LINK)], LINK
    )
    graph = graphs.chain(12)
    problem = _problem(graph, cluster=cluster, micro_batch_size=1, max_replicas=1)
    units = {stage.devices[0]: len(stage.units) for stage in _draft(auto(problem, _control())).stages}
    assert 2 * units[1] < units[0]
    equal = replace(problem, cluster=Cluster.uniform(DEVICE, 2, LINK))
    units = {stage.devices[0]: len(stage.units) for stage in _draft(auto(equal, _control())).stages}
    assert abs(units[1] - units[0]) <= 1
