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
from lightning_gpp.planning import Prediction, Request, best_plan
from lightning_gpp.reports import svg
from lightning_gpp.reports.gantt import Chart
from lightning_gpp.reports.timeline import summary

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"

LENGTH, WIDTH, BATCH_SIZE = 256, 1024, 16

PIXELS: Final = 980
MARGIN: Final = 16
"""Width of the picture, and of its edge."""

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
    return above_each_other({"Chain": chain, "Graph": branching})


def above_each_other(predictions: dict[str, Prediction]) -> str:
    """The timelines of several plans on axes of the same length."""
    longest, top, elements = max(each.seconds for each in predictions.values()), MARGIN, list[str]()
    for name, prediction in predictions.items():
        chart = Chart(prediction.timeline, PIXELS, longest)
        title = f"{name}: {len(prediction.plan.stages)} stages, {prediction.plan.depth} deep"
        elements.append(svg.text(MARGIN, top + 12, title, classes="title"))
        elements.append(f'<g transform="translate(0 {top + 16})">{"".join(chart.elements())}</g>')
        top += 16 + chart.height
    label = "; ".join(f"{name}: {summary(each.timeline)}" for name, each in predictions.items())
    return svg.document(PIXELS, top, elements, label=label)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "chain_and_graph.svg").write_text(chain_and_graph())


if __name__ == "__main__":
    main()
