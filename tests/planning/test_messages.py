"""Seconds of messages by the positions of an order, against counting them one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.planning.partitioners.auto.order_costs import furthest, message_seconds
from tests.planning.problems import DEVICE, random_problem


@pytest.mark.parametrize("seed", range(5))
def test_messages_cross_either_end_of_a_stage(seed: int) -> None:
    link = Link(bytes_per_second=10, overlap=False)
    problem = replace(random_problem(seed, num_units=6), cluster=Cluster.uniform(DEVICE, 2, link))
    order = Random(seed).sample(range(6), k=6)
    found = message_seconds(problem, np.array(order), 3)
    for start, stop in product(range(7), repeat=2):
        inside = set(order[start:stop])
        crossing = [
            value.bytes.at(3) * value.num_directions / 10
            for value in problem.units.values
            for dst in value.dsts
            if (value.src in inside) != (dst in inside)
        ]
        assert found[start, stop] == pytest.approx(sum(crossing))


def test_the_last_end_within_the_limit_may_be_behind_ends_that_are_not() -> None:
    """A border after the first unit is dear; one after the second is not."""
    row = np.array([0.0, 1.0, 2.0, 9.0])
    messages = np.zeros((4, 4))
    messages[0, 1] = messages[1, 2] = 50
    assert furthest(row, messages, row + 3).tolist() == [2, 1, 2, 3]
