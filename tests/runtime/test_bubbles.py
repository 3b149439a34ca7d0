"""Pieces of other work begin only if they fit into a wait."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from lightning_gpp.runtime.bubbles import Bubbles


class Arriving:
    """A message that arrives at a time."""

    def __init__(self, seconds: float) -> None:
        self._arrival = time.perf_counter() + seconds

    def wait(self) -> None:
        time.sleep(max(0.0, self._arrival - time.perf_counter()))

    def is_completed(self) -> bool:
        return False


def sleeping(seconds: float, number: int = 1000) -> Iterator[None]:
    for _ in range(number):
        time.sleep(seconds)
        yield


def filled(pieces: Iterator[None]) -> Bubbles:
    bubbles = Bubbles()
    bubbles.fill(pieces, torch.device("cpu"))
    return bubbles


def test_waits_are_filled_once_they_are_known() -> None:
    bubbles, expected = filled(sleeping(0.005)), 0.0
    for _ in range(3):
        expected = bubbles.wait(Arriving(0.2), expected)
    bubbles.end()
    assert 20 <= bubbles.number <= 80  # none in the first wait
    assert bubbles.waited == pytest.approx(0.6, abs=0.15)
    assert bubbles.used > 0.25
    assert bubbles.late < 0.1


def test_a_piece_that_does_not_fit_is_not_begun() -> None:
    bubbles = filled(sleeping(0.05))
    bubbles.wait(Arriving(0.12), 0.12)  # tells how long a piece takes
    number = bubbles.number
    bubbles.wait(Arriving(0.04), 0.04)
    bubbles.end()
    assert bubbles.number == number >= 1


def test_a_slow_first_piece_and_one_that_was_too_long_do_not_end_the_others() -> None:
    def pieces() -> Iterator[None]:
        yield from sleeping(0.1, 1)
        yield from sleeping(0.002)

    bubbles = filled(pieces())
    bubbles.wait(Arriving(0.05), 0.05)
    assert bubbles.late > 0.02
    bubbles.wait(Arriving(0.05), 0.05)
    bubbles.end()
    assert bubbles.number > 5


def test_the_rest_runs_at_once_and_the_end_is_noticed() -> None:
    bubbles = filled(sleeping(0.0, 7))
    bubbles.rest()
    bubbles.end()
    assert (bubbles.number, bubbles.pieces) == (7, None)


def test_an_error_says_that_it_comes_from_a_piece() -> None:
    def failing() -> Iterator[None]:
        yield from sleeping(0.0, 1)
        raise ValueError("no such file")

    bubbles = filled(failing())
    with pytest.raises(ValueError, match="no such file") as raised:
        bubbles.rest()
    bubbles.end()
    assert "fills the bubbles" in raised.value.__notes__[0]
