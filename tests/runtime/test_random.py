"""Random streams: steps draw the same again, nobody disturbs the user's; and runs that are compared draw nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import TorchDispatchMode, fake_mode, schema_arguments
from lightning_gpp.runtime import RandomStreams
from lightning_gpp.runtime.random import Neutral, mix, seed_streams, undisturbed


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


ON_GPUS = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Rates(TorchDispatchMode):
    """Notes the rates of dropout with which operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for place, argument in enumerate(schema_arguments(func)):
            if argument.name == "dropout_p":
                self.found[func.name()] = args[place] if place < len(args) else argument.default_value
        return func(*args, **(kwargs or {}))


def test_fused_attention_drops_nothing_in_its_backward_either() -> None:
    """On GPUs, a forward without dropout leaves the seed of its mask undefined, and the backward would make one of it.

    The tensors are on the meta device, as CPUs do not have these operators.
    """
    attention, backward = (
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_backward,
    )
    q = torch.empty(2, 4, 8, 16, device="meta")
    with Rates() as rates, Neutral():
        out, sums, *starts, longest, longest_key, seed, offset, _ = attention(q, q, q, 0.3)
        backward(q, q, q, q, out, sums, *starts, longest, longest_key, 0.3, False, seed, offset)
    assert rates.found == {attention.default.name(): 0.0, backward.default.name(): 0.0}


class Fused(nn.Module):
    """Attention and a recurrent network, which drop in fused kernels on GPUs."""

    def __init__(self, recurrent: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.TransformerEncoderLayer(32, 4, 32, dropout=0.4, batch_first=True)
        self.recurrent = recurrent(32, 32, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(self.attention(x))[0].float().square().mean()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPUS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_have_the_same_gradients(device: str, dtype: torch.dtype) -> None:
    recurrent = nn.GRU if (device, dtype) == ("cpu", torch.bfloat16) else nn.LSTM  # not all CPUs have that kernel
    module = Fused(recurrent).to(device)
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1)).to(device)
    first, second = (_gradients(module, x, dtype) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


def _gradients(module: nn.Module, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    module.zero_grad()
    with Neutral():
        with torch.autocast(x.device.type, dtype, enabled=dtype is not torch.float32):
            loss = module(x)
        loss.backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
