"""Ports that messages share: bookings against a list of all busy times."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.simulation.ports import Bookings, book

requests = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=25)


def test_a_gap_is_used_where_it_is_long_enough() -> None:
    port = Bookings()
    assert [book([port], *entry) for entry in [(0, 2), (5, 2), (0, 4), (0, 3), (1, 1)]] == [0, 5, 7, 2, 11]
    assert (port.starts, port.stops) == ([0], [12])


def test_two_ports_are_taken_at_the_same_time() -> None:
    out, into = Bookings(), Bookings()
    out.add(0, 3)
    into.add(4, 2)
    assert book([out, into], 0, 2) == 6
    assert book([out, into], 0, 1) == 3


def test_messages_without_bytes_or_ports_take_no_room() -> None:
    port = Bookings()
    port.add(0, 5)
    assert book([port], 2, 0) == 2
    assert book([], 2, 7) == 2
    assert (port.starts, port.stops) == ([0], [5])


@given(entries=requests)
def test_each_is_booked_as_early_as_there_is_room(entries: list[tuple[int, int]]) -> None:
    port, busy = Bookings(), set[int]()
    for start, seconds in entries:
        expected = next(time for time in range(start, 500) if busy.isdisjoint(range(time, time + seconds)))
        assert book([port], start, seconds) == expected
        busy |= set(range(expected, expected + seconds))
    assert sum(stop - start for start, stop in zip(port.starts, port.stops, strict=True)) == len(busy)
    assert all(stop < start for stop, start in zip(port.stops, port.starts[1:], strict=False))
    assert all(first < second for first, second in pairwise(port.starts))


@given(
    entries=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 20), st.integers(1, 4)), max_size=20
    )
)
def test_both_ends_are_free(entries: list[tuple[int, int, int, int]]) -> None:
    ports = [Bookings() for _ in range(6)]
    busy: list[set[int]] = [set() for _ in ports]
    for src, dst, start, seconds in entries:
        ends = (src, 3 + dst)
        taken = busy[ends[0]] | busy[ends[1]]
        expected = next(time for time in range(start, 500) if taken.isdisjoint(range(time, time + seconds)))
        assert book([ports[end] for end in ends], start, seconds) == expected
        for end in ends:
            busy[end] |= set(range(expected, expected + seconds))
