"""Properties of what the default partitioner changes: nothing gets lost, whatever the problem."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.planning import Draft, DraftStage, Evaluator, Problem
from lightning_gpp.planning.partitioners.auto.coarse import coarse
from lightning_gpp.planning.partitioners.auto.moves import arranged, moves
from lightning_gpp.planning.partitioners.auto.seeds import orders, seed, variants
from lightning_gpp.planning.problem.draft import side_by_side
from tests.planning.problems import random_problem

problems = st.builds(random_problem, st.integers(0, 10_000), st.integers(2, 14), st.integers(2, 6))


def _weights(problem: Problem) -> np.ndarray:
    return problem.seconds(problem.sizes[-1]).total


def random_draft_of(problem: Problem, random: Random) -> Draft:
    """Any groups, cycles included; the step's comes last."""
    number = random.randint(1, min(problem.num_units, problem.num_devices))
    units = list(range(problem.num_units - 1))
    random.shuffle(units)
    borders = sorted(random.sample(range(1, problem.num_units), number - 1))
    pieces = [units[a:b] for a, b in zip([0, *borders], [*borders, problem.num_units - 1], strict=True)]
    groups = [tuple(sorted(piece)) for piece in pieces[:-1]] + [tuple(sorted([*pieces[-1], problem.num_units - 1]))]
    cuts = sorted(random.sample(range(1, problem.num_devices), number - 1))
    devices = side_by_side([b - a for a, b in zip([0, *cuts], [*cuts, problem.num_devices], strict=True)])
    size = random.choice(problem.sizes)
    stages = (DraftStage(units=a, devices=b, micro_batch_size=size) for a, b in zip(groups, devices, strict=True))
    return Draft(stages=tuple(stages), schedule=problem.schedules[0])


def _with(problem: Problem, **changes: object) -> Problem:
    return replace(problem, **changes)  # type: ignore[arg-type]


def _assert_whole(problem: Problem, draft: Draft) -> None:
    assert sorted(unit for group in draft.groups for unit in group) == list(range(problem.num_units))
    assert all(list(group) == sorted(group) and group for group in draft.groups)
    assert draft.num_devices == problem.num_devices or (
        problem.idle_devices and draft.num_devices < problem.num_devices
    )
    assert min(draft.replicas) >= 1
    assert problem.num_units - 1 in draft.groups[-1]
    assert len(draft.groups) == len(draft.replicas)
    assert draft.size in problem.sizes
    devices = [device for stage in draft.stages for device in stage.devices]
    assert len(set(devices)) == len(devices)
    assert set(devices) <= set(range(problem.num_devices))
    assert set(arranged(draft).stages) == set(draft.stages)
    assert 0 in draft.stages[-1].devices


@settings(max_examples=60, deadline=None)
@given(problem=problems, seed=st.integers(0, 10_000), idle=st.booleans())
def test_moves_keep_all_units_and_devices(problem: Problem, seed: int, idle: bool) -> None:
    """Also those that follow a move, for which devices may be idle or out of order."""
    random = Random(seed)
    problem = _with(problem, idle_devices=idle)
    draft = random_draft_of(problem, random)
    _assert_whole(problem, draft)
    for _ in range(3):
        others = list(moves(problem, draft, [random.random() for _ in draft.groups]))
        for other in others:
            _assert_whole(problem, other)
            assert other != draft
        draft = random.choice(others or [draft])


@settings(max_examples=40, deadline=None)
@given(problem=problems)
def test_orders_are_topological(problem: Problem) -> None:
    found = orders(problem, _weights(problem))
    assert len({tuple(order) for order in found}) == len(found) >= 1
    for order in found:
        place = {unit: index for index, unit in enumerate(order)}
        assert sorted(order) == list(range(problem.num_units))
        assert all(place[a] < place[b] for a, b in problem.order.edges)


@settings(max_examples=40, deadline=None)
@given(problem=problems)
def test_first_drafts_are_whole_and_do_not_wait_in_a_circle(problem: Problem) -> None:
    for cuts in variants(problem, orders(problem, _weights(problem))):
        draft = seed(problem, cuts)
        _assert_whole(problem, draft)
        owner = {unit: stage for stage, group in enumerate(draft.groups) for unit in group}
        assert all(owner[a] <= owner[b] for a, b in problem.order.edges)


@settings(max_examples=40, deadline=None)
@given(problem=problems, num_pieces=st.integers(2, 8), seed=st.integers(0, 10_000))
def test_drafts_of_pieces_are_drafts_of_units(problem: Problem, num_pieces: int, seed: int) -> None:
    found = coarse(problem, num_pieces)
    if found.problem.num_units > 1:
        draft = random_draft_of(found.problem, Random(seed))
        refined = found.refined(draft)
        _assert_whole(problem, refined)
        large, fine = Evaluator(found.problem)(draft), Evaluator(problem)(refined)
        assert fine.seconds == pytest.approx(large.seconds)
        assert fine.peak_bytes == pytest.approx(large.peak_bytes)
