"""Slices of equal cost, against all ways to cut, and the share of the work that grows."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.planning.assignment.slices import cost_of, equal_parts


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1))
@settings(deadline=None)
def test_parts_follow_each_other_and_cost_all(number: int, length: int, growing: float) -> None:
    number = min(number, length)
    parts = equal_parts(number, length, growing)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == length
    assert all(start < stop for start, stop in parts)
    assert sum(cost_of(part, length, growing) for part in parts) == pytest.approx(1)


@pytest.mark.parametrize("growing", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_the_dearest_slice_is_hardly_dearer_than_it_must_be(growing: float, number: int) -> None:
    """Against every way to cut 24 tokens: within what one token costs."""
    length = 24
    best = min(
        max(cost_of(part, length, growing) for part in zip((0, *cuts), (*cuts, length), strict=True))
        for cuts in combinations(range(1, length), number - 1)
    )
    found = max(cost_of(part, length, growing) for part in equal_parts(number, length, growing))
    assert found <= best + cost_of((length - 1, length), length, growing)
