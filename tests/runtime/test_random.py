"""Random streams are functions of where and when they are used."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_gpp._compat.torch import fake_mode
from lightning_gpp.runtime import RandomStreams
from lightning_gpp.runtime.random import mix, seed_streams, undisturbed


def test_mix_is_splitmix64() -> None:
    """The first numbers of the published generator seeded with 0 and with 0x9E3779B97F4A7C15."""
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


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


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_equal_seeds_give_the_step_equal_draws(device: str) -> None:
    """A step that draws noise on its device draws the same for the inputs of the network and for the loss."""
    torch.zeros(1, device=device)  # a process that has used the device
    drawn = []
    for _ in range(2):
        seed_streams(7)
        drawn.append((random.random(), np.random.rand(), torch.rand(3), torch.rand(3, device=device)))
    (python, numpy, *tensors), again = drawn
    assert (python, numpy) == again[:2]
    assert all(torch.equal(*pair) for pair in zip(tensors, again[2:], strict=True))


@pytest.mark.parametrize("numpys", [None, np.random.MT19937()], ids=["NumPy's own", "another generator"])
@pytest.mark.parametrize("device", DEVICES)
def test_draws_inside_do_not_disturb_the_streams_outside(device: str, numpys: np.random.MT19937 | None) -> None:
    torch.zeros(1, device=device)
    seed_streams(7)
    expected = random.random(), np.random.rand(), torch.rand(3), torch.rand(3, device=device)
    seed_streams(7)
    with undisturbed(numpys):
        seed_streams(8)
        _ = random.random(), np.random.rand(), torch.rand(3), torch.rand(3, device=device)
    found = random.random(), np.random.rand(), torch.rand(3), torch.rand(3, device=device)
    assert found[:2] == expected[:2]
    assert all(torch.equal(*pair) for pair in zip(found[2:], expected[2:], strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_streams_go_on_after_a_recording(device: str) -> None:
    """A state is no tensor of the recording, in which tensors are fake."""
    torch.zeros(1, device=device)
    seed_streams(7)
    expected = torch.rand(3), torch.rand(3, device=device)
    seed_streams(7)
    with fake_mode(), undisturbed():
        seed_streams(8)
    assert all(map(torch.equal, expected, (torch.rand(3), torch.rand(3, device=device))))
