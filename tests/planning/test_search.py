from math import inf

import pytest

from lightning_gpp.planning.partition import SMOOTHING, Partition
from lightning_gpp.planning.search import search
from lightning_gpp.planning.starts import cut, orders
from tests.planning.brute_force import best_score, chain_problem, random_problem


@pytest.mark.parametrize("seed", range(12))
def test_close_to_the_best_of_all_partitions(seed: int) -> None:
    problem = random_problem(seed, num_units=8, num_stages=2 + seed % 3)
    found = search(problem)
    assert found.score() <= 1.05 * best_score(problem)
    assert set(found.stage) == set(range(problem.num_stages))


@pytest.mark.parametrize("seed", range(5))
def test_moves_keep_the_estimate_of_a_fresh_partition(seed: int) -> None:
    problem = random_problem(seed, num_units=12, num_stages=3)
    partition = Partition(problem, [unit % 3 for unit in range(12)])
    for unit in range(12):
        partition.move(unit, (unit * 7 + seed) % 3)
        assert partition.score() == pytest.approx(Partition(problem, partition.stage).score())


def test_cycles_score_infinite() -> None:
    assert Partition(chain_problem(3, 2), [0, 1, 0]).score() == inf
    assert Partition(chain_problem(3, 2), [0, 0, 1]).score() < inf


@pytest.mark.parametrize("seed", range(5))
def test_orders_are_topological(seed: int) -> None:
    problem = random_problem(seed, num_units=20, num_stages=3)
    for order in orders(problem):
        assert sorted(order) == list(range(20))
        position = {unit: index for index, unit in enumerate(order)}
        assert all(position[src] < position[dst] for src, dst in problem.units.graph().edges)


def test_the_cut_of_a_chain_is_the_best_one() -> None:
    seconds = [3, 1, 1, 5, 2, 2]
    parts = [[float(sum(seconds[start : stop + 1])) for stop in range(start, 6)] for start in range(6)]
    assert cut(3, range(6), parts) == [0, 0, 0, 1, 2, 2]


def test_a_chain_of_equal_stages_takes_the_known_time() -> None:
    partition = Partition(chain_problem(4, 4, num_micro_batches=6), [0, 1, 2, 3])
    assert partition.ways() == [(pytest.approx(d + 0.01 * (d - 1)), d) for d in (4, 3, 2, 1)]
    turn = (4 + 3 * 0.01) / 4
    assert partition.score() == pytest.approx(4 + 3 * 0.01 + 5 * (turn + SMOOTHING))
