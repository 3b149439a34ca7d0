"""Codecs: the error of 8-bit integers, the numbers that they keep, and the forms that both ends know."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_gpp.runtime.codecs import EIGHT_BIT, EXACT, form_of

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def there_and_back(tensor: Tensor, batch_dim: int | None = None) -> Tensor:
    form = form_of(tensor, batch_dim)
    sent = EIGHT_BIT.encode(tensor, batch_dim)
    assert (tuple(sent.shape), sent.dtype) == EIGHT_BIT.travels(form)[:2]
    received = EIGHT_BIT.decode(sent.contiguous(), form)
    assert form_of(received) == form_of(tensor)
    assert received.is_contiguous()
    return received


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("batch_dim", [0, 1, 2, None])
def test_the_error_is_half_a_level_of_the_samples_range(dtype: torch.dtype, batch_dim: int | None) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(5, 7, 40) * torch.logspace(-3, 3, 7)[:, None]).to(dtype)
    error = (there_and_back(tensor, batch_dim) - tensor).double().abs()
    others = [dim for dim in range(3) if dim != batch_dim]
    span = tensor.double().amax(others) - tensor.double().amin(others)
    rounding = torch.finfo(dtype).eps * tensor.double().abs().amax(others)
    assert (error.amax(others) <= span / 504 * 1.001 + rounding).all()
    assert error.amax() > span.amax() / 1000  # they are 8 bits


@pytest.mark.parametrize("dtype", TYPES)
def test_ends_and_numbers_that_are_not_finite_do_not_change(dtype: torch.dtype) -> None:
    least, most = torch.finfo(dtype).min, torch.finfo(dtype).max
    rows = [
        [0.0, -torch.inf, 0.0, -torch.inf],
        [0.0, least, 0.0, least],
        [most, least, torch.inf, torch.nan],
        [torch.nan, torch.nan, -torch.inf, torch.inf],
        [3.5, 3.5, 3.5, 3.5],
        [torch.finfo(dtype).tiny, 0.0, 0.0, 0.0],
    ]
    tensor = torch.tensor(rows, dtype=torch.float64).to(dtype).repeat(1, 8)
    torch.testing.assert_close(there_and_back(tensor, 0), tensor, rtol=0, atol=0, equal_nan=True)


def test_a_sample_is_encoded_alone() -> None:
    tensor = torch.randn(6, 3, 30)
    together = there_and_back(tensor, 0)
    apart = torch.cat([there_and_back(part, 0) for part in tensor.split([1, 2, 3])])
    assert torch.equal(together, apart)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(100),
        torch.ones(50, dtype=torch.bool),
        torch.ones(50, dtype=torch.complex64),
        torch.randn(100, 2),
        torch.randn(0, 100)[:, :0],
    ],
    ids=["integers", "flags", "complex", "short rows", "nothing"],
)
def test_other_tensors_travel_as_they_are(tensor: Tensor) -> None:
    assert EIGHT_BIT.encode(tensor, 0) is tensor
    assert EIGHT_BIT.travels(form_of(tensor, 0)) == form_of(tensor, 0) == EXACT.travels(form_of(tensor, 0))
    assert torch.equal(there_and_back(tensor, 0), tensor)


@given(numbers=st.lists(st.floats(width=32), min_size=1, max_size=40), samples=st.integers(0, 4))
def test_any_numbers(numbers: list[float], samples: int) -> None:
    tensor = torch.tensor(numbers).repeat(samples, 3)
    received = there_and_back(tensor, 0)
    finite = tensor.isfinite()
    assert torch.equal(received.isfinite(), finite)
    torch.testing.assert_close(received[~finite], tensor[~finite], equal_nan=True)
    if finite.any():
        span = tensor[finite].double().max() - tensor[finite].double().min()
        assert (received - tensor)[finite].double().abs().max() <= span / 500 + 1e-44
