"""Calls that only some ranks make are told from all that ranks may rightly wait for."""

from __future__ import annotations

import pytest

from lightning_gpp.failure.stuck import Standstill, lonely_call

BARRIER = Standstill(call="barrier", line="train.py:3")
ELSEWHERE = Standstill(call="barrier", line="train.py:9")
SAVING = Standstill(call="save_checkpoint", line="train.py:5", ranks=(1,))
NUMBERS = Standstill(call="recv", ranks=(0,), what="waiting for numbers from rank 0")
LIBRARY = Standstill(call="barrier", what="waiting for all ranks to come to the same point")


def sending(rank: int) -> Standstill:
    return Standstill(ranks=(rank,), what=f"waiting for rank {rank} to take tensors")


@pytest.mark.parametrize(
    ("places", "finished", "expected"),
    [
        ([BARRIER, NUMBERS], (), "waits in barrier at train.py:3 for rank 1, which does not"),
        ([SAVING, NUMBERS], (), "waits in save_checkpoint at train.py:5 for rank 1"),
        ([BARRIER, LIBRARY, sending(1)], (), "for ranks 1, 2, which do not"),
        ([BARRIER, None], (1,), "rank 1 has finished"),
        ([BARRIER, ELSEWHERE], (), None),  # both are barriers
        ([BARRIER, None], (), None),  # it may come
        ([BARRIER, sending(2), sending(1)], (), None),  # a large tensor is on its way between two ranks
        ([LIBRARY, NUMBERS], (), None),  # no line of the user's
        ([Standstill(call="recv", line="train.py:4"), NUMBERS], (), None),
    ],
)
def test_who_is_missing(places: list[Standstill | None], finished: tuple[int, ...], expected: str | None) -> None:
    found = lonely_call(dict(enumerate(places)), frozenset(finished))
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found[0] == 0
        assert expected in found[1]
