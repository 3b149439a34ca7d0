"""Properties of what the default partitioner changes: nothing gets lost, whatever the problem."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.planning import Evaluator, Problem
from lightning_gpp.planning.partitioners.auto.coarse import coarse
from lightning_gpp.planning.partitioners.auto.moves import moves
from lightning_gpp.planning.partitioners.auto.seeds import Cuts, orders, seeds
from lightning_gpp.planning.partitioners.auto.shape import Shape
from tests.planning.problems import random_problem

problems = st.builds(random_problem, st.integers(0, 10_000), st.integers(2, 14), st.integers(2, 6))


def _weights(problem: Problem) -> np.ndarray:
    return problem.seconds(problem.sizes[-1]).total


def _random_shape(problem: Problem, random: Random) -> Shape:
    """Any groups, cycles included; the step's comes last."""
    number = random.randint(1, min(problem.num_units, problem.num_devices))
    units = list(range(problem.num_units - 1))
    random.shuffle(units)
    borders = sorted(random.sample(range(1, problem.num_units), number - 1))
    pieces = [units[a:b] for a, b in zip([0, *borders], [*borders, problem.num_units - 1], strict=True)]
    groups = [tuple(sorted(piece)) for piece in pieces[:-1]] + [tuple(sorted([*pieces[-1], problem.num_units - 1]))]
    cuts = sorted(random.sample(range(1, problem.num_devices), number - 1))
    return Shape(
        groups=tuple(groups),
        replicas=tuple(b - a for a, b in zip([0, *cuts], [*cuts, problem.num_devices], strict=True)),
        size=random.choice(problem.sizes),
        schedule=problem.schedules[0],
    )


def _with(problem: Problem, **changes: object) -> Problem:
    return replace(problem, **changes)  # type: ignore[arg-type]


def _assert_whole(problem: Problem, shape: Shape) -> None:
    assert sorted(unit for group in shape.groups for unit in group) == list(range(problem.num_units))
    assert all(list(group) == sorted(group) and group for group in shape.groups)
    assert sum(shape.replicas) == shape.num_devices
    assert shape.num_devices == problem.num_devices or (
        problem.idle_devices and shape.num_devices < problem.num_devices
    )
    assert min(shape.replicas) >= 1
    assert problem.num_units - 1 in shape.groups[-1]
    assert len(shape.groups) == len(shape.replicas)
    assert shape.size in problem.sizes
    draft = shape.draft()
    devices = [device for stage in draft.stages for device in stage.devices]
    assert len(set(devices)) == len(devices) == shape.num_devices
    assert set(devices) <= set(range(problem.num_devices))
    again = Shape.of(draft)
    assert again is not None
    assert set(again.draft().stages) == set(draft.stages)
    assert 0 in draft.stages[-1].devices


@settings(max_examples=60, deadline=None)
@given(problem=problems, seed=st.integers(0, 10_000), idle=st.booleans())
def test_moves_keep_all_units_and_devices(problem: Problem, seed: int, idle: bool) -> None:
    """Also those that follow a move, for which devices may be idle or out of order."""
    random = Random(seed)
    problem = _with(problem, idle_devices=idle)
    shape = _random_shape(problem, random)
    _assert_whole(problem, shape)
    for _ in range(3):
        others = list(moves(problem, shape, [random.random() for _ in shape.groups]))
        for other in others:
            _assert_whole(problem, other)
            assert other != shape
        shape = random.choice(others or [shape])


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
@given(problem=problems, width=st.sampled_from([1, 1, 2]), apart=st.booleans(), again=st.booleans())
def test_seeds_are_whole_and_do_not_wait_in_a_circle(problem: Problem, width: int, apart: bool, again: bool) -> None:
    width = width if problem.num_devices % width == 0 else 1
    for order in orders(problem, _weights(problem)):
        cuts = Cuts(order=order, size=problem.sizes[-1], width=width, apart=apart, recompute=again)
        numbers = []
        for shape in seeds(problem, cuts, lambda seconds: True):
            _assert_whole(problem, shape)
            owner = {unit: stage for stage, group in enumerate(shape.groups) for unit in group}
            assert all(owner[a] <= owner[b] for a, b in problem.order.edges)
            numbers.append(len(shape.groups))
        assert len(numbers) == len(set(numbers))
        assert numbers or apart


@settings(max_examples=40, deadline=None)
@given(problem=problems, num_pieces=st.integers(2, 8), seed=st.integers(0, 10_000))
def test_shapes_of_pieces_are_shapes_of_units(problem: Problem, num_pieces: int, seed: int) -> None:
    found = coarse(problem, num_pieces)
    if found.problem.num_units > 1:
        shape = _random_shape(found.problem, Random(seed))
        refined = found.refined(shape)
        _assert_whole(problem, refined)
        large, fine = Evaluator(found.problem)(shape.draft()), Evaluator(problem)(refined.draft())
        assert fine.seconds == pytest.approx(large.seconds)
        assert fine.peak_bytes == pytest.approx(large.peak_bytes)
