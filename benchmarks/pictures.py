"""The pictures of the documentation, simulated anew: docs/pictures/*.svg.

python -m benchmarks.pictures [NAME ...]   # clip, recommender, ...: only these models of docs/tutorials/real_models.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.planners.case_study import draft_of
from benchmarks.planners.common import simulated
from benchmarks.workloads.layers import Block, Trained
from lightning_gpp.capture import capture_step
from lightning_gpp.cli.task import predict, task_of
from lightning_gpp.cluster.presets import preset_cluster
from lightning_gpp.config_files import config_folder
from lightning_gpp.graph import Affine
from lightning_gpp.plan import SOURCE, STEP, Edge, Figures, Plan, Stage
from lightning_gpp.planning import Prediction, Request
from lightning_gpp.reports import svg
from lightning_gpp.reports.graph import GraphPicture
from lightning_gpp.reports.timeline import Chart, summary
from lightning_gpp.reports.units import duration, percent, size
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, simulate

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"

LENGTH, WIDTH, BATCH_SIZE = 256, 1024, 16

PIXELS: Final = 980
MARGIN: Final = 16
"""Width of the picture, and of its edge."""

MODALITIES: Final = ("vision", "video", "audio", "text")

LAYERS: Final = ("model.width=1024", "model.num_layers=8", "model.num_heads=16")
MODELS: Final = {
    "clip": ("data.batch_size=1024", *LAYERS),
    "translation": ("data.batch_size=1024", *LAYERS),
    "recommender": ("data.batch_size=8192", "model.width=2048", "model.num_layers=4"),
    "captioning": ("data.batch_size=512", "model.width=2048", "model.num_layers=4", "model.num_heads=16"),
    "album": ("data.batch_size=256", *LAYERS),
    "sorting": ("data.batch_size=1024", *LAYERS),
    "mixture": ("data.batch_size=128", *LAYERS),
    "diffusion": ("data.batch_size=1024", "model.channels=256", *LAYERS),
}
"""Experiments, in sizes for GPUs."""

SCHEDULES: Final = ("gpipe", "1f1b", "zb_h1")


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


def stage_of(module: str) -> int:
    """The stage of a module: half of a modality each, the head with the last one."""
    if module not in ("head", STEP):
        modality, layer, *_ = module.split(".")
        return 2 * MODALITIES.index(modality) + int(layer) // 4
    return 2 * len(MODALITIES) - 1


def chain_and_graph() -> str:
    """The same eight stages of one model as a chain and as a graph, each stage on a device of its own."""
    with torch.device("meta"):
        module = MultiModal()
        inputs = [torch.empty(BATCH_SIZE, LENGTH, WIDTH) for _ in MODALITIES]
        graph = capture_step(module, (*inputs, torch.empty(BATCH_SIZE, LENGTH))).graph
    request = Request(cluster=preset_cluster("dgx_a100"), batch_size=BATCH_SIZE, recompute=False)
    problem = request.problem(graph)
    return above_each_other(
        {
            name: simulated(problem, draft_of(problem, stage_of, 1, range(7, -1, -1), chained=chained))
            for name, chained in (("Chain", True), ("Graph", False))
        }
    )


def real_model(name: str) -> str:
    """The plan of an example on eight H100, and how much longer the step is as a chain, and on one H100."""
    graph, chain, one = (
        planned(name, *settings)
        for settings in (
            ("strategy.num_pipelines=1",),
            ("strategy.num_pipelines=1", "strategy=chain"),
            ("cluster.num_devices=1",),
        )
    )
    longer = [f"{other.seconds / graph.seconds:.2f}" for other in (chain, one)]
    print(name, *(duration(each.seconds) for each in (graph, chain, one)), *longer, flush=True)
    return above_each_other({f"8 H100 (as a chain {longer[0]} times, on one {longer[1]} times as long)": graph})


def planned(name: str, *settings: str) -> Prediction:
    """The plan that `gpp-plan` makes."""
    hardware = ("cluster=dgx_h100", "trainer.precision=bf16-mixed")
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("plan", overrides=[f"experiment={name}", *MODELS[name], *hardware, *settings])
    return predict(task_of(config))


def above_each_other(predictions: dict[str, Prediction]) -> str:
    """Stage graphs and timelines of several plans, on axes of the same length."""
    longest, top, elements = max(each.seconds for each in predictions.values()), MARGIN, list[str]()
    for name, prediction in predictions.items():
        plan, timeline = prediction.plan, prediction.timeline
        picture, chart = GraphPicture(plan), Chart(timeline, PIXELS, longest)
        scale = min(0.6, (PIXELS - 2 * MARGIN) / (picture.width + 2 * MARGIN))
        figures = f"step {duration(timeline.makespan)}, idle {percent(timeline.bubble_fraction)}"
        figures += f", peak {size(max(timeline.peak_bytes))}"
        elements += [
            svg.text(MARGIN, top + 12, f"{name}: {len(plan.stages)} stages, {plan.depth} deep", classes="title"),
            svg.text(PIXELS - MARGIN, top + 12, figures, "end", "strong"),
            f'<g transform="translate(0 {top + 16}) scale({scale:.3f})">{"".join(picture.elements())}</g>',
        ]
        top += 16 + int(scale * (picture.height + 2 * MARGIN))
        elements.append(f'<g transform="translate(0 {top})">{"".join(chart.rows())}</g>')
        top += chart.bottom + 3 * MARGIN
    label = "; ".join(f"{name}: {summary(each.timeline)}" for name, each in predictions.items())
    return svg.document(PIXELS, top, elements, label=label)


def schedules() -> str:
    """Three schedules of a chain of four equal stages and eight micro-batches, on axes of the same length."""
    stages = tuple(
        Stage(name=f"stage{k}", modules=(f"{k}",) if k < 3 else ("3", STEP), devices=(3 - k,), micro_batch_size=1)
        for k in range(4)
    )
    edges = (Edge(src=SOURCE, dst=0), *(Edge(src=k, dst=k + 1) for k in range(3)))
    plan = Plan(stages=stages, edges=edges, batch_size=8)
    one, kept = Affine(1), Affine(2**30)
    cost = Figures(
        forward_seconds=one, input_seconds=one, weight_seconds=one, activation_bytes=kept, pending_bytes=kept
    )
    costs = StageCosts(stages=(cost,) * len(stages))
    timelines = {name: simulate(compile_program(replace(plan, schedule=name)), costs) for name in SCHEDULES}
    longest, top, elements = max(each.makespan for each in timelines.values()), MARGIN, list[str]()
    for name, timeline in timelines.items():
        chart = Chart(timeline, PIXELS, longest)
        held = max(timeline.peak_in_flight.values())
        figures = f"idle {percent(timeline.bubble_fraction)}, up to {held} micro-batches in flight"
        elements += [
            svg.text(MARGIN, top + 12, name, classes="title"),
            svg.text(PIXELS - MARGIN, top + 12, figures, "end", "strong"),
            f'<g transform="translate(0 {top + 12})">{"".join(chart.rows())}</g>',
        ]
        top += chart.bottom + 3 * MARGIN
    return svg.document(PIXELS, top, elements, label=", ".join(timelines))


def main(names: Sequence[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    if not names:
        (FOLDER / "chain_and_graph.svg").write_text(chain_and_graph())
        (FOLDER / "schedules.svg").write_text(schedules())
    for name in names or MODELS:
        (FOLDER / f"{name}.svg").write_text(real_model(name))


if __name__ == "__main__":
    main(sys.argv[1:])
