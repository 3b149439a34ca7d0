"""Checks the result of a training step: a loss, or a dict with one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_gpp.errors import CaptureError, StepError
from lightning_gpp.wording import with_article


def loss_of(output: Any, num_samples: int | None = None) -> torch.Tensor:
    """The loss in the result of a training step; `num_samples` of the step's mini-batch are for messages.

    Raises:
        CaptureError: the step returned None, which only a step that runs as a whole may.
        StepError: there is no loss, or it is not a scalar.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if output is None:
        raise CaptureError(
            "training_step returned None instead of a loss. A micro-batch cannot be skipped: return a zero loss (for "
            "example 0 * loss), or choose strategy.step=whole, with which None skips the mini-batch."
        )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise StepError(
            "training_step must return the loss as a scalar tensor, or a dict with it under 'loss'; it returned "
            f"{_described(output, loss, num_samples)}."
        )
    return loss


def trained_loss(output: Any, num_samples: int | None = None) -> torch.Tensor:
    """The loss in the result of a training step, which a backward can start from; see `loss_of`.

    Raises:
        CaptureError, StepError: see `loss_of`; or the loss has no gradient.
    """
    loss = loss_of(output, num_samples)
    if not loss.requires_grad:
        raise StepError(
            "training_step returned a loss without a gradient: it was detached (.detach(), .item(), "
            "torch.no_grad()), or depends on no parameter that is trained. Return the loss as it was computed."
        )
    return loss


def _described(output: Any, loss: Any, num_samples: int | None) -> str:
    if isinstance(loss, torch.Tensor):
        samples = "" if num_samples is None else f" for {num_samples} samples"
        return f"a tensor of shape {tuple(loss.shape)}{samples}"
    if isinstance(output, Mapping) and loss is None:
        return f"a dict with the keys {list(output)}"
    return with_article(type(loss).__name__)
