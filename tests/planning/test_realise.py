"""From drafts to plans: copies of a pipeline, the step on one device, recomputation, chains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import SOURCE, STEP
from lightning_gpp.planning import Draft, DraftStage, Problem, Request
from lightning_gpp.planning.problem.draft import (
    copies,
    in_topological_order,
    layouts,
    realise,
    side_by_side,
    unreplicated,
)
from lightning_gpp.schedules import compile_program, verify
from tests.planning import graphs
from tests.planning.drafts import DEVICE


def _problem(graph: OperatorGraph, num_devices: int, **options: object) -> Problem:
    settings: dict[str, object] = {
        "cluster": Cluster.uniform(DEVICE, num_devices, Link()),
        "batch_size": 24,
        "micro_batch_size": 4,
        **options,
    }
    return Request(**settings).problem(graph)  # type: ignore[arg-type]


def _draft(groups: list[tuple[int, ...]], devices: list[tuple[int, ...]], size: int = 4, **options: object) -> Draft:
    stages = (
        DraftStage(units=units, devices=where, micro_batch_size=size)
        for units, where in zip(groups, devices, strict=True)
    )
    return Draft(stages=tuple(stages), **options)  # type: ignore[arg-type]


HALVES = [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_layouts() -> None:
    assert side_by_side([2, 1, 3]) == [(4, 5), (3,), (0, 1, 2)]
    assert copies(3, 2) == [(2, 5), (1, 4), (0, 3)]
    assert layouts([2, 1, 3]) == [side_by_side([2, 1, 3])]
    assert layouts([2, 2]) == [[(2, 3), (0, 1)], [(1, 3), (0, 2)]]
    assert layouts([1, 1]) == [[(1,), (0,)]]


def test_a_plain_draft() -> None:
    problem = _problem(graphs.chain(8), 2)
    plan, num_pipelines = realise(problem, _draft(HALVES, [(1,), (0,)]), "fingerprint")
    assert num_pipelines == 1
    assert [stage.modules for stage in plan.stages] == [
        tuple(f"blocks.{index}" for index in range(4)),
        (*(f"blocks.{index}" for index in range(4, 8)), STEP),
    ]
    assert [stage.devices for stage in plan.stages] == [(1,), (0,)]
    assert [stage.micro_batch_size for stage in plan.stages] == [4, 4]
    assert (plan.batch_size, plan.schedule, plan.model) == (24, "1f1b", "fingerprint")
    assert [(edge.src, edge.dst) for edge in plan.edges] == [(SOURCE, 0), (0, 1)]


def test_stages_come_in_topological_order() -> None:
    problem = _problem(graphs.two_towers(2), 3)
    groups = [(8,), (4, 5, 6, 7), (0, 1, 2, 3)]
    draft = _draft(groups, [(0,), (1,), (2,)])
    plan, _ = realise(problem, draft)
    assert [stage.modules for stage in plan.stages] == [("text_tower",), ("image_tower",), ("head", STEP)]
    assert [stage.devices for stage in plan.stages] == [(1,), (2,), (0,)]
    assert in_topological_order(problem, draft).stages[-1].units == (8,)


def test_equal_replicas_one_pipeline_apart_are_copies() -> None:
    problem = _problem(graphs.chain(8), 4)
    plan, num_pipelines = realise(problem, _draft(HALVES, copies(2, 2)))
    assert num_pipelines == 2
    assert [stage.devices for stage in plan.stages] == [(1,), (0,)]
    assert [stage.micro_batch_size for stage in plan.stages] == [2, 2]
    assert plan.batch_size == 12
    assert [STEP in stage.modules for stage in plan.stages] == [False, True]


@pytest.mark.parametrize(
    ("options", "size"), [({"num_pipelines": 1}, 4), ({"micro_batch_size": 3}, 3), ({"batch_size": 25}, 4)]
)
def test_no_copies_where_they_are_not_wanted_or_do_not_divide(options: dict[str, object], size: int) -> None:
    problem = _problem(graphs.chain(8), 4, **options)
    draft = _draft(HALVES, copies(2, 2), size)
    plan, num_pipelines = realise(problem, draft)
    assert (num_pipelines, plan.num_devices) == (1, 4)
    assert (unreplicated(problem, draft) == (draft, 1)) == problem.replicable


def test_the_step_of_a_replicated_stage_is_a_stage_of_its_own() -> None:
    problem = _problem(graphs.chain(8), 3)
    plan, _ = realise(problem, _draft(HALVES, [(2,), (0, 1)]))
    assert [(stage.name, stage.devices) for stage in plan.stages][-1] == ("step", (0,))
    assert plan.stages[-1].modules == (STEP,)
    assert STEP not in plan.stages[1].modules
    assert [(edge.src, edge.dst) for edge in plan.edges if edge.src != SOURCE] == [(0, 1), (1, 2)]
    verify(compile_program(plan))


def test_the_step_is_never_recomputed() -> None:
    problem = _problem(graphs.chain(8), 3)
    draft = _draft(HALVES, [(2,), (0, 1)])
    draft = replace(draft, stages=tuple(replace(stage, recompute=True) for stage in draft.stages))
    plan, _ = realise(problem, draft)
    assert [stage.recompute for stage in plan.stages] == [True, False, False]
    whole, _ = realise(problem, replace(draft, stages=(replace(draft.stages[0], devices=(1,)), draft.stages[1])))
    assert not next(stage for stage in whole.stages if STEP in stage.modules).recompute


def test_chained_drafts_become_chains() -> None:
    problem = _problem(graphs.two_towers(2), 3)
    draft = _draft([(0, 1, 2, 3), (4, 5, 6, 7), (8,)], [(2,), (1,), (0,)])
    free, chain = realise(problem, draft)[0], realise(problem, replace(draft, chained=True))[0]
    assert (free.depth, chain.depth) == (2, 3)
    assert [(edge.src, edge.dst) for edge in chain.edges if edge.artificial] == [(0, 1)]
    assert not any(edge.artificial for edge in free.edges)
