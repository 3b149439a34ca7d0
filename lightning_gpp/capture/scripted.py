"""Modules of TorchScript (`torch.jit.script`): they take no hooks, and their parameters can be no other tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lightning_gpp.capture.isolate import names_of
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.errors import CaptureError
from lightning_gpp.wording import named


def scripted_in(module: nn.Module) -> Iterator[tuple[str, torch.jit.ScriptModule]]:
    """Scripted modules in a module, with their paths; each runs as a whole."""
    return ((path, part) for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule))


def refuse_scripted_states(module: nn.Module) -> None:
    """Refuse scripted modules with parameters or buffers, which a rank without them could not drop.

    Raises:
        CaptureError: there is one.
    """
    for path, part in scripted_in(module):
        if next(names_of(part), None) is not None:
            raise not_scripted(path, "has parameters or buffers, which stay in its script")


def not_scripted(path: str, reason: str) -> CaptureError:
    """The error of a scripted module that cannot be a part of a pipeline."""
    return refusal(
        f"the call of {named(path)}",
        f"this torch.jit.ScriptModule {reason}",
        "use the nn.Module itself instead of its scripted or traced form",
    )
