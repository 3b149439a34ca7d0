"""Models to plan for: those of the GraphPipe paper, and a U-Net. They are real, but use no memory.

`graph("mmt")` is the captured operator graph of `WORKLOADS["mmt"]`.
"""

from __future__ import annotations

from functools import cache

import torch

from benchmarks.workloads.recommendation import candle_uno, dlrm
from benchmarks.workloads.transformers import case_study, mmt
from benchmarks.workloads.unet import unet
from benchmarks.workloads.workload import Built, Workload
from lightning_gpp.capture import capture_step
from lightning_gpp.graph import OperatorGraph

__all__ = ["WORKLOADS", "Built", "Workload", "build", "graph"]

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        mmt(4),
        mmt(2),
        dlrm(),
        *(candle_uno(num_branches) for num_branches in (7, 2, 4, 8, 16)),
        case_study(),
        unet(),
    )
}


def build(name: str) -> Built:
    """The model and the example batch of a workload, on the meta device."""
    with torch.device("meta"):
        return WORKLOADS[name].build()


@cache
def graph(name: str) -> OperatorGraph:
    """The operators of a workload's training step; the same object every time, so do not change it."""
    return capture_step(*build(name)).graph
