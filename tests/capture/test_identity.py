"""A buffer that a forward replaces must not lend its identity to tensors that come after it."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from lightning_gpp.capture.recorder import Recorder
from lightning_gpp.capture.recording import StateRef
from lightning_gpp.capture.refusal import Changes


def test_replaced_buffers_stay_known() -> None:
    module = nn.BatchNorm1d(2)
    recorder = Recorder(4, Changes())
    recorder.watch(module)
    known = id(module.running_mean)
    module.running_mean = torch.ones(2)
    gc.collect()
    others: list[Tensor] = [torch.zeros(2) for _ in range(1000)]
    assert known not in map(id, others)
    assert not any(isinstance(recorder.refs(tensor), StateRef) for tensor in others)
