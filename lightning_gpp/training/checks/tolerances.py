"""Differences that rounding explains."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from lightning_gpp.stages.undivided import Captured
from lightning_gpp.training.host import Job

TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Tolerances relative to the gradient's norm; wide for low precision, as wrong models are sought, not rounding."""


def least_precise(job: Job, captured: Captured, loss: torch.dtype) -> torch.dtype:
    """The least precise type that gradients pass through, with that of the loss; modules may compute in another type
    than that of their parameters.
    """
    specs = (spec for operator in captured.graph for spec in operator.outputs)
    kinds = {getattr(torch, spec.dtype) for spec in specs if spec.requires_grad}
    known = {rounded_to(kind, job.device, job.module) for kind in {job.precision, loss, *kinds} & set(TOLERANCES)}
    return max(known, key=TOLERANCES.__getitem__, default=torch.float64)


def rounded_to(dtype: torch.dtype, device: torch.device, module: nn.Module) -> torch.dtype:
    """The type with the precision in which a module multiplies numbers of a type on a device.

    GPUs may round float32 to TF32, which has as many bits as float16. In convolutions and recurrent networks torch lets
    them, unless told otherwise.
    """
    return torch.float16 if dtype is torch.float32 and device.type == "cuda" and _has_tf32(module) else dtype


_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _has_tf32(module: nn.Module) -> bool:
    """True if a kind of layer of the module may be rounded to TF32."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    settings = (products, nn.Module), (cudnn.conv, _CONVOLUTIONS), (cudnn.rnn, nn.RNNBase)  # type: ignore[attr-defined]
    parts = list(module.modules())
    return any(
        setting.fp32_precision == "tf32" and any(isinstance(part, kind) for part in parts) for setting, kind in settings
    )
