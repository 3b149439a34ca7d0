"""Seconds of messages by the positions of an order, against counting them one by one."""

from __future__ import annotations

import numpy as np

from lightning_gpp.planning.partitioners.auto.order_costs import furthest


def test_the_last_end_within_the_limit_may_be_behind_ends_that_are_not() -> None:
    """A border after the first unit is dear; one after the second is not."""
    row = np.array([0.0, 1.0, 2.0, 9.0])
    messages = np.zeros((4, 4))
    messages[0, 1] = messages[1, 2] = 50
    assert furthest(row, messages, row + 3).tolist() == [2, 1, 2, 3]
