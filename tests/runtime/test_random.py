"""Random streams are functions of where and when they are used."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_gpp.runtime import RandomStreams
from lightning_gpp.runtime.random import mix


def test_mix_is_splitmix64() -> None:
    """The first numbers of the published generator seeded with 0 and with 0x9E3779B97F4A7C15."""
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_every_position_counts() -> None:
    keys = {RandomStreams(0).key(*place) for place in itertools.product(range(6), repeat=4)}
    assert len(keys) == 6**4
    assert len(keys & {RandomStreams(1).key(*place) for place in itertools.product(range(6), repeat=4)}) == 0


def test_the_outer_stream_goes_on_even_after_an_error() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="inside"):
        _draw_and_fail()
    assert torch.equal(torch.rand(2), expected)


def _draw_and_fail() -> None:
    with RandomStreams(5).use(0, 0, 0, 0):
        torch.rand(7)
        raise ValueError("inside")
