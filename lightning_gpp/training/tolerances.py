"""Differences that rounding explains."""

from __future__ import annotations

from typing import Final

import torch

from lightning_gpp.stages.undivided import Captured
from lightning_gpp.training.host import Job

TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Tolerances relative to the gradient's norm; wide for low precision, as wrong models are sought, not rounding."""


def least_precise(job: Job, captured: Captured, loss: torch.dtype) -> torch.dtype:
    """The least precise type that gradients pass through, with that of the loss; modules may compute in another type
    than that of their parameters.
    """
    specs = (spec for operator in captured.graph for spec in operator.outputs)
    kinds = {getattr(torch, spec.dtype) for spec in specs if spec.requires_grad and not spec.dynamic}
    return max({job.precision, loss, *kinds} & set(TOLERANCES), key=TOLERANCES.__getitem__, default=torch.float64)
