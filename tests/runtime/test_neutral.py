"""In a comparison nothing is dropped: neither in forwards, nor in the backwards of fused operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import TorchDispatchMode, schema_arguments
from lightning_gpp.runtime.random import Neutral

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
