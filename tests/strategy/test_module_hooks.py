"""Captures leave nothing in users' hooks on modules."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gpp.capture import capture_step
from tests.strategy import harness


def test_captures_leave_nothing_in_callbacks() -> None:
    module, kept = harness.make_module(), list[Tensor]()
    module.left.register_forward_hook(lambda part, args, output: kept.append(output.detach()))
    capture_step(module, next(iter(harness.loader())))
    assert kept == []
    module(torch.zeros(2, 4).double(), torch.zeros(2, 3).double())
    assert len(kept) == 1
