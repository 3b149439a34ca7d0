"""The differences that rounding explains depend on how a device multiplies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_gpp.training.checks.self_check import rounded_to

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def ieee() -> Iterator[None]:
    """Torch without TF32, as before afterwards."""
    known = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in known]
    for kind in known:
        kind.fp32_precision = "ieee"
    yield
    for kind, precision in zip(known, before, strict=True):
        kind.fp32_precision = precision


CONVOLUTION, LINEAR = nn.Sequential(nn.Conv2d(1, 1, 1)), nn.Linear(1, 1)


def test_gpus_round_convolutions_by_default() -> None:
    assert rounded_to(torch.float32, GPU, CONVOLUTION) is torch.float16
    assert rounded_to(torch.float32, GPU, nn.GRU(1, 1)) is torch.float16
    assert rounded_to(torch.float32, GPU, LINEAR) is torch.float32
    assert rounded_to(torch.float32, CPU, CONVOLUTION) is torch.float32
    for precise in (torch.float64, torch.bfloat16):
        assert rounded_to(precise, GPU, CONVOLUTION) is precise


@pytest.mark.usefixtures("ieee")
def test_gpus_round_what_they_are_told_to() -> None:
    assert rounded_to(torch.float32, GPU, CONVOLUTION) is torch.float32
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as torch.set_float32_matmul_precision("high") does
    assert rounded_to(torch.float32, GPU, LINEAR) is torch.float16
