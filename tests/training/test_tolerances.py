"""The differences that rounding explains depend on how a device multiplies."""

from __future__ import annotations

import torch
from torch import nn

from lightning_gpp.training.checks.self_check import rounded_to

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


CONVOLUTION, LINEAR = nn.Sequential(nn.Conv2d(1, 1, 1)), nn.Linear(1, 1)


def test_gpus_round_convolutions_by_default_and_products_if_they_are_told_to() -> None:
    assert rounded_to(torch.float32, GPU, CONVOLUTION) is torch.float16
    assert rounded_to(torch.float32, GPU, nn.GRU(1, 1)) is torch.float16
    assert rounded_to(torch.float32, GPU, LINEAR) is torch.float32
    assert rounded_to(torch.float32, CPU, CONVOLUTION) is torch.float32
    for precise in (torch.float64, torch.bfloat16):
        assert rounded_to(precise, GPU, CONVOLUTION) is precise
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as torch.set_float32_matmul_precision("high") does
    try:
        assert rounded_to(torch.float32, GPU, LINEAR) is torch.float16
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
