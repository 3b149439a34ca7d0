"""The lower bound from the stages along a path: what it counts, and that no plan of a chain beats it."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import numpy as np
import pytest

from lightning_gpp.planning import Problem
from lightning_gpp.planning.bounds import bound
from lightning_gpp.planning.bounds.bound import bound_of_size
from lightning_gpp.planning.bounds.path import PathBound, PathShare
from tests.planning.problems import Given, cluster_of, problem_of
from tests.planning.test_bound import SLACK, optimum_of


def _share(fewest: int, forward: list[float], backward: list[float], summing: list[float], number: int) -> PathShare:
    first, last = np.array(forward), np.array(backward)
    return PathShare(
        fewest=fewest,
        busy=number * (first + last),
        forward=first,
        backward=last,
        way=first + last,
        summing=np.array(summing),
    )


def _best(path: PathBound, least: float = 1.0) -> float:
    while not path.complete(least):
        least = path.better(least)
    return least


def _path(*shares: PathShare, number: int, num_devices: int, cell: int = 1) -> PathBound:
    return PathBound(shares=shares, number=number, num_devices=num_devices, cell=cell)


def test_the_last_stage_waits_for_the_way_to_it_and_back() -> None:
    """Three equal units on three devices, four micro-batches: 4 + 2 times three seconds."""
    share = _share(1, [1.0] * 3, [2.0] * 3, [0.0] * 3, 4)
    assert _best(_path(share, number=4, num_devices=3)) == pytest.approx(18, rel=6e-3)


def test_fewer_devices_than_stages_take_longer() -> None:
    """The first of two stages has two of the three units, which take 4 * 6 seconds."""
    share = _share(1, [1.0] * 3, [2.0] * 3, [0.0] * 3, 4)
    assert _best(_path(share, number=4, num_devices=2)) == pytest.approx(24, rel=6e-3)


def test_the_sum_of_the_first_stage_follows_the_last_gradient() -> None:
    """The second stage: 1 + 2 * 3 + 2 seconds until its last gradient has passed the first one, which then sums."""
    share = _share(2, [1.0, 1.0], [2.0, 2.0], [10.0, 0.0], 2)
    assert _best(_path(share, number=2, num_devices=4)) == pytest.approx(19, rel=6e-3)


def test_a_first_stage_waits_for_the_way_through_the_others() -> None:
    """It is busy for 10 seconds, and its only other forward fills one of the three until the first gradient."""
    share = _share(1, [1.0, 1.0], [4.0, 2.0], [0.0, 0.0], 2)
    assert _best(_path(share, number=2, num_devices=2)) == pytest.approx(12, rel=6e-3)


def test_coarser_cells_never_raise_it() -> None:
    shares = [
        _share(fewest, [1.0 / fewest] * 6, [2.0 / fewest] * 6, [0.1 * (fewest > 1)] * 6, 8) for fewest in (1, 2, 3, 5)
    ]
    bounds = [_best(_path(*shares, number=8, num_devices=12, cell=cell)) for cell in (1, 2, 3)]
    assert bounds[0] >= bounds[1] / 1.005
    assert bounds[0] >= bounds[2] / 1.005


def _chain(seed: int) -> Problem:
    """A random chain, some with values that skip units, with micro-batches that do not divide the mini-batch, too."""
    random = Random(seed)
    number = random.randint(3, 6)
    values = [(unit, (unit + 1,)) for unit in range(number - 1)]
    values += [(unit, (unit + 2,)) for unit in range(number - 2) if random.random() < 0.3]
    problem = problem_of(random, number, values, cluster_of(random, random.randint(2, 4)))
    costs = Given(problem.costs.forward, random.choice((0.5, 2.0)))  # type: ignore[attr-defined]
    return replace(
        problem, costs=costs, sizes=random.choice(((1, 5), (2, 7), (3, 12))), max_replicas=random.choice((1, inf))
    )


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_of_a_chain_beats_it(seed: int) -> None:
    problem = _chain(seed)
    for size in problem.sizes:
        assert bound_of_size(problem, size) <= optimum_of(replace(problem, sizes=(size,))) * SLACK


def test_it_is_the_best_bound_of_many_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [_chain(seed) for seed in range(40)]
    found = [bound_of_size(problem, problem.sizes[0]) for problem in problems]
    monkeypatch.setattr(bound, "path_bound", lambda *_: None)
    others = [bound_of_size(problem, problem.sizes[0]) for problem in problems]
    assert all(entry >= other for entry, other in zip(found, others, strict=True))
    assert sum(entry > 1.02 * other for entry, other in zip(found, others, strict=True)) >= 10
