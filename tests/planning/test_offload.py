"""Stages that do not fit offload where this takes less time than recomputation."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from benchmarks.planners.common import simulated
from lightning_gpp.cluster import Cluster
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning import Draft, DraftStage, Problem, Request, best_plan
from lightning_gpp.planning.problem.evaluate import Evaluator
from tests.planning.problems import DEVICE
from tests.planning.test_recomputation import LINK, layered

NUM_STAGES = 6


def graph_of() -> OperatorGraph:
    return replace(layered(Random(2), 12), uncalled=frozenset({"layers"}))


def request_of(memory: float, link: float, **changes: object) -> Request:
    """Six devices, and a link to the host of `link` bytes per second."""
    device = replace(DEVICE, memory_bytes=memory, peak_host_bytes_per_second=link, bytes_efficiency=1.0)
    settings = {"max_replicas": 1, "num_micro_batches": 16, "offload": "auto", "batch_size": 64} | changes
    cluster = Cluster.uniform(device, NUM_STAGES, LINK)
    return Request(cluster=cluster, seconds=4.0, **settings)  # type: ignore[arg-type]


def problem_of(memory: float, link: float, **changes: object) -> Problem:
    return request_of(memory, link, **changes).problem(graph_of())


def equal_stages(problem: Problem, schedule: str = "1f1b") -> Draft:
    units = list(range(problem.num_units))
    cuts = [round(len(units) * stage / NUM_STAGES) for stage in range(NUM_STAGES + 1)]
    stages = [
        DraftStage(units=tuple(units[first:last]), devices=(NUM_STAGES - 1 - index,), micro_batch_size=problem.sizes[0])
        for index, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False))
    ]
    return Draft(stages=tuple(stages), schedule=schedule)


def tight() -> float:
    """Memory for a tenth less activations than the fullest stage would keep."""
    free = problem_of(1e12, 0)
    draft = equal_stages(free)
    peaks = Evaluator(free)(draft).peak_bytes
    fullest = max(range(NUM_STAGES), key=peaks.__getitem__)
    static = float(free.static_bytes[list(draft.stages[fullest].units)].sum())
    return static + 0.9 * (peaks[fullest] - static)


def measures(problem: Problem) -> tuple[bool, bool]:
    """Whether any stage recomputes, and whether any offloads."""
    stages = Evaluator(problem).fitted(equal_stages(problem)).stages
    return any(stage.recompute for stage in stages), any(stage.offload for stage in stages)


@pytest.mark.parametrize(
    ("link", "changes", "expected"),
    [
        (1e9, {}, (False, True)),
        (1e4, {}, (True, False)),
        (0, {}, (True, False)),
        (1e9, {"offload": None}, (True, False)),
        (1e9, {"offload": False}, (True, False)),
        (1e9, {"recompute": False}, (False, True)),
        (0, {"recompute": False}, (False, False)),
    ],
)
def test_the_faster_measure(link: float, changes: dict[str, object], expected: tuple[bool, bool]) -> None:
    assert measures(problem_of(tight(), link, **changes)) == expected


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("link", [1e5, 3e5, 1e9])
def test_the_program_needs_what_the_estimate_says(link: float, schedule: str) -> None:
    """Bytes exactly. Seconds are overestimated where copies wait for each other less than computing does."""
    problem = problem_of(1e12, link, offload=True)
    draft = Evaluator(problem).fitted(equal_stages(problem, schedule))
    assert [stage.offload for stage in draft.stages] == [True] * (NUM_STAGES - 1) + [False]
    estimate, program = Evaluator(problem)(draft), simulated(problem, draft)
    assert program.peak_bytes == pytest.approx(estimate.peak_bytes[::-1])
    assert program.seconds <= estimate.seconds * 1.001
    if link >= 3e5:
        assert program.seconds == pytest.approx(estimate.seconds, rel=0.02)


def test_a_search_offloads_only_with_a_fast_link() -> None:
    """The plan on a fast link takes less time than without it, and its program fits."""
    memory = tight()
    fast, slow = (best_plan("auto", graph_of(), request_of(memory, link)) for link in (1e9, 1e3))
    assert fast.fits
    assert slow.fits
    assert not any(stage.offload for stage in slow.plan.stages)
    assert fast.seconds <= slow.seconds
