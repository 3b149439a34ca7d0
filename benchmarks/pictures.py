"""The pictures of the documentation, simulated anew: docs/pictures/*.svg.

python -m benchmarks.pictures
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.layers import Block, Trained
from lightning_gpp.capture import capture_step
from lightning_gpp.cluster.presets import preset_cluster
from lightning_gpp.planning import Request, best_plan
from lightning_gpp.reports.side_by_side import chain_and_graph_svg

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"

LENGTH, WIDTH, BATCH_SIZE = 256, 1024, 16

MODALITIES: Final = ("vision", "video", "audio", "text")


class MultiModal(Trained):
    """An encoder of eight Transformer layers for each modality `[batch, 256, 1024]`, and a head that reads them all."""

    def __init__(self) -> None:
        super().__init__()
        for name in MODALITIES:
            self.add_module(name, nn.Sequential(*(Block(WIDTH, num_heads=16, hidden=4 * WIDTH) for _ in range(8))))
        self.head = nn.Linear(len(MODALITIES) * WIDTH, 1)

    def forward(self, *inputs: Tensor) -> Tensor:
        results = [self.get_submodule(name)(x) for name, x in zip(MODALITIES, inputs, strict=True)]
        return self.head(torch.cat(results, dim=-1)).squeeze(-1)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        *inputs, target = batch
        return F.mse_loss(self(*inputs), target)


def chain_and_graph() -> str:
    """The best chain and the best graph of one model on the same devices, each stage on a device of its own."""
    with torch.device("meta"):
        module = MultiModal()
        inputs = [torch.empty(BATCH_SIZE, LENGTH, WIDTH) for _ in MODALITIES]
        graph = capture_step(module, (*inputs, torch.empty(BATCH_SIZE, LENGTH))).graph
    chain, branching = (
        best_plan(
            "auto",
            graph,
            Request(
                cluster=preset_cluster("dgx_a100"),
                idle_devices=False,
                batch_size=BATCH_SIZE,
                chained=chained,
                max_replicas=1,
                num_pipelines=1,
                recompute=False,
            ),
        )
        for chained in (True, False)
    )
    heading = f"One mini-batch of {BATCH_SIZE} samples of a model of four modalities on 8 A100 GPUs, simulated"
    return chain_and_graph_svg(chain, branching, heading)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "chain_and_graph.svg").write_text(chain_and_graph())


if __name__ == "__main__":
    main()
