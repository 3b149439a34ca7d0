"""Very large models on up to 16,384 GPUs, on paper: plans, step times, memory, and what limits them.

    python -m benchmarks.planners.large_models [megatron gpt multimodal] [--seconds 10] [--rows 3]

What repeats is planned once: of r pipelines that are alike one is searched and simulated, with the collectives of all;
and a device of a plan is a group of GPUs that share its layers (tensor parallelism). For each number of GPUs per group
and each number of pipelines, stages of equal layers are rated by the quick simulator; for the best layout `auto`
searches, and programs are simulated.

`megatron` compares with table 1 of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM" (SC 2021, arXiv 2104.04473): the same models, GPUs, mini-batches and degrees. Nothing is fitted:
products reach half of the peak, as in all preset clusters. Mixed precision: 2 bytes for weights and gradients, 12 more
of float32 for master weights and Adam. Published rates count the recomputation of all layers as work (equation 3 of the
paper); model FLOP utilisation (MFU) does not.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import numpy as np
import torch

from benchmarks.planners.common import search, table
from benchmarks.workloads.gpt import GPT
from benchmarks.workloads.multimodal import AudioEncoder, LanguageModel, VisionAudioLanguage, VisionEncoder, projector
from lightning_gpp.capture import capture_step
from lightning_gpp.cluster import Cluster, preset_cluster
from lightning_gpp.costs.model import Footprint
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning import Draft, DraftStage, Prediction, Problem, Request
from lightning_gpp.planning.problem.draft import realise
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.prediction import predicted
from lightning_gpp.training.measured.machine import Machine, of_groups

LENGTH, VOCABULARY = 2048, 51200
REASON = "its layers are divided among the GPUs of a group"


class Mixed(Footprint):
    """Weights and gradients of 2 bytes, master weights and Adam's state of 12."""

    @property
    def copies(self) -> float:
        return 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of Megatron's table: model, GPUs, degrees, mini-batch, and TFLOP/s per GPU."""

    layers: int
    width: int
    tensor: int
    stages: int
    gpus: int
    batch_size: int
    tflops: float

    @property
    def pipelines(self) -> int:
        return self.gpus // (self.tensor * self.stages)

    @property
    def parameters(self) -> float:
        """In billions."""
        return (12 * self.layers * self.width**2 + VOCABULARY * self.width) / 1e9

    def flops(self) -> float:
        """FLOPs of a step, with recomputation: equation 3 of the paper."""
        layers, width = self.layers, self.width
        extra = 1 + LENGTH / (6 * width) + VOCABULARY / (16 * layers * width)
        return 96 * self.batch_size * LENGTH * layers * width**2 * extra


MEGATRON: Final = tuple(
    Row(layers=layers, width=width, tensor=tensor, stages=stages, gpus=gpus, batch_size=batch_size, tflops=tflops)
    for layers, width, tensor, stages, gpus, batch_size, tflops in (
        (24, 2304, 1, 1, 32, 512, 137),
        (30, 3072, 2, 1, 64, 512, 138),
        (36, 4096, 4, 1, 128, 512, 142),
        (40, 6144, 8, 1, 256, 1024, 135),
        (48, 8192, 8, 2, 512, 1536, 138),
        (60, 10240, 8, 4, 1024, 1792, 140),
        (80, 12288, 8, 8, 1536, 2304, 148),
        (96, 16384, 8, 16, 1920, 2160, 155),
        (105, 20480, 8, 35, 2520, 2520, 163),
        (128, 25600, 8, 64, 3072, 3072, 163),
    )
)


# -- models -----------------------------------------------------------------------------------------------------------


def gpt(layers: int, width: int, *, whole: bool = True) -> OperatorGraph:
    """A GPT in bfloat16. `whole`: its layers are called whole, as for tensor parallelism, and count as one operator."""
    with torch.device("meta"):
        module = GPT(layers, width, VOCABULARY, LENGTH).to(torch.bfloat16)
        batch = torch.zeros(4, LENGTH + 1, dtype=torch.long)
    uncut = {f"blocks.{layer}": REASON for layer in range(layers)} if whole else {}
    return capture_step(module, batch, uncut=uncut).graph


class HalfPrecisionLanguageModel(LanguageModel):
    """The language model with angles in the precision of its values."""

    def forward(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        rates = 10000 ** (-torch.arange(0, self.head_width, 2, device=x.device) / self.head_width)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), rates).to(x.dtype)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x[:, -num_tokens:]))


class LargeMultimodal(VisionAudioLanguage):
    """Encoders of 5.5 and 2.4 billion parameters in front of a language model of 488 billion."""

    def __init__(self) -> None:
        super(VisionAudioLanguage, self).__init__()
        width = 20480
        self.vision, self.vision_projector = VisionEncoder(3200, 45, 25), projector(3200, width)
        self.audio, self.audio_projector = AudioEncoder(2048, 48, 16), projector(2048, width)
        self.embedding = torch.nn.Embedding(32000, width)
        self.language = HalfPrecisionLanguageModel(width, 96, 160, 55296)


def multimodal() -> OperatorGraph:
    """The multimodal model in bfloat16."""
    with torch.device("meta"):
        module = LargeMultimodal().to(torch.bfloat16)
        image, audio = torch.empty(4, 3, 336, 336), torch.empty(4, 128, 3000)
        batch = image.bfloat16(), audio.bfloat16(), torch.zeros(4, 1025, dtype=torch.long)
    whole = [f"{part}.layers.{i}" for part in ("vision", "audio", "language") for i in range(96)]
    paths = dict(module.named_modules())
    return capture_step(module, batch, uncut={path: REASON for path in whole if path in paths}).graph


def divided(graph: OperatorGraph) -> dict[str, int]:
    """The cuts of Megatron: matrices that end a block along their input, others and the vocabulary along the output."""
    ends = ("out.weight", "down.weight")
    words = ("tokens.weight", "embedding.weight", "head.weight")
    inside = (name for name in graph.parameter_sizes if ".layers." in name or "blocks." in name or name.endswith(words))
    return {name: int(name.endswith(ends)) for name in inside if "norm" not in name}


# -- plans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """GPUs per group, stages of a pipeline, pipelines, and samples of a micro-batch."""

    tensor: int
    stages: int
    pipelines: int
    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A graph with a cluster and a mini-batch."""

    graph: OperatorGraph
    cluster: Cluster
    batch_size: int
    recompute: bool | None = None

    def request(self, layout: Layout, seconds: float = 10.0) -> tuple[OperatorGraph, Request]:
        """The graph of one GPU, and the request for the pipelines of a layout."""
        machine, graph = Machine(cluster=self.cluster, footprint=Mixed()), self.graph
        if layout.tensor > 1:
            machine = of_groups(machine, divided(graph), (layout.tensor,), graph)
        request = Request(
            cluster=machine.cluster,
            idle_devices=False,
            batch_size=self.batch_size,
            footprint=machine.footprint,
            costs=machine.costs,
            num_pipelines=layout.pipelines,
            micro_batch_size=layout.size,
            max_replicas=1,
            recompute=self.recompute,
            sharding="auto" if layout.pipelines > 1 else "none",
            seconds=seconds,
        )
        return machine.part(graph), request

    def problem(self, layout: Layout) -> Problem:
        """The question for one of the pipelines."""
        graph, request = self.request(layout)
        number = layout.pipelines
        return replace(
            request,
            cluster=request.cluster.subset(range(layout.stages)),
            batch_size=self.batch_size // number,
            num_pipelines=1,
            num_copies=number,
        ).problem(graph)


def equal_layers(problem: Problem, num_stages: int, size: int, *, recompute: bool = False) -> Draft:
    """Stages with layers of equal seconds, in their order. `recompute`: all layers, otherwise what the memory needs."""
    layers = np.array([any(map(is_layer, unit.modules)) for unit in problem.units.units])
    seconds = np.where(layers, problem.seconds(size).total, 0.0)
    middle = seconds.cumsum() - seconds / 2
    numbers = np.minimum(middle / seconds.sum() * num_stages, num_stages - 1).astype(int).tolist()
    groups = [tuple(unit for unit, number in enumerate(numbers) if number == stage) for stage in range(num_stages)]
    filled = [units for units in groups if units]
    return Draft(
        stages=tuple(
            DraftStage(
                units=units,
                devices=(len(filled) - 1 - index,),
                micro_batch_size=size,
                recompute=_layers(problem, units) if recompute else None,
            )
            for index, units in enumerate(filled)
        )
    )


def is_layer(path: str) -> bool:
    """True for a block of a model."""
    return path.rpartition(".")[0].endswith(("blocks", "layers"))


def _layers(problem: Problem, units: tuple[int, ...]) -> tuple[str, ...]:
    pairs = zip(problem.blocks, problem.units_of_blocks, strict=True)
    return tuple(block.path for block, needed in pairs if needed <= set(units))


def layouts(model: Model, most_stages: int = 96) -> Iterator[Layout]:
    """All that use every GPU."""
    for tensor in (1, 2, 4, 8):
        groups = model.cluster.num_devices // tensor
        for stages in range(1, most_stages + 1):
            pipelines, rest = divmod(groups, stages)
            if not rest and model.batch_size % pipelines == 0:
                share = model.batch_size // pipelines
                yield from (
                    Layout(tensor=tensor, stages=stages, pipelines=pipelines, size=size)
                    for size in (1, 2, 4)
                    if share % size == 0
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A layout with its prediction, and the seconds that rating all layouts, searching and simulating took."""

    layout: Layout
    prediction: Prediction
    seconds: float


def rated(model: Model, layout: Layout) -> float:
    """Estimated seconds of a step with stages of equal layers; infinite if they do not fit."""
    problem = model.problem(layout)
    if layout.stages > problem.num_units:
        return inf
    found = Evaluator(problem)(equal_layers(problem, layout.stages, layout.size))
    return found.seconds + sums_of_gradients(model, layout) if found.fits else inf


def sums_of_gradients(model: Model, layout: Layout) -> float:
    """Seconds in which the pipelines add up the gradients of a GPU's parameters."""
    if layout.pipelines == 1:
        return 0.0
    held = sum(model.graph.parameter_bytes.values()) / (layout.tensor * layout.stages)
    apart = layout.tensor * layout.stages
    devices = tuple(range(0, apart * layout.pipelines, apart))
    return model.cluster.all_reduce_seconds(devices, held)


def simulated_on(model: Model, layout: Layout, problem: Problem, draft: Draft) -> Prediction:
    """The prediction for all pipelines of a layout."""
    plan, _ = realise(problem, Evaluator(problem).fitted(draft))
    graph, request = model.request(layout)
    costs = request.operator_costs(graph)
    return predicted(plan, graph, request.cluster, costs, request.footprint, layout.pipelines)


def best(model: Model, seconds: float) -> Found:
    """The fastest layout by the estimate, with the better of equal layers and what `auto` finds for one pipeline."""
    began = time.perf_counter()
    layout = min(layouts(model), key=lambda layout: rated(model, layout))
    problem = model.problem(layout)
    drafts = [equal_layers(problem, layout.stages, layout.size)]
    answer, _ = search("auto", problem, seconds)
    drafts += [answer.draft] if answer.draft else []
    predictions = [simulated_on(model, layout, problem, draft) for draft in drafts]
    prediction = min(predictions, key=lambda entry: entry.rank)
    return Found(layout=layout, prediction=prediction, seconds=time.perf_counter() - began)


# -- tables -----------------------------------------------------------------------------------------------------------


def megatron(options: argparse.Namespace) -> Iterator[str]:
    """Megatron's own degrees with recomputation of all layers, and what the planner chooses."""
    rows = []
    for row in MEGATRON[: options.rows]:
        model = Model(graph=gpt(row.layers, row.width), cluster=a100(row.gpus), batch_size=row.batch_size)
        layout = Layout(tensor=row.tensor, stages=row.stages, pipelines=row.pipelines)
        problem = model.problem(layout)
        theirs = simulated_on(model, layout, problem, equal_layers(problem, row.stages, 1, recompute=True))
        ours = best(model, options.seconds)
        rate = row.flops() / row.gpus / 1e12
        rows.append(
            [
                f"{row.parameters:.1f}",
                row.gpus,
                f"{row.tensor}, {row.stages}, {row.pipelines}",
                row.tflops,
                f"{rate / theirs.seconds:.0f} ({rate / theirs.seconds / row.tflops - 1:+.0%})",
                *figures(model, ours, rate * 3 / 4),
            ]
        )
        print(rows[-1], flush=True)
    header = ["10^9 parameters", "GPUs", "Megatron's tensor, stages, pipelines", "TFLOP/s published", "simulated"]
    yield table([*header, *FIGURES], rows)


FIGURES: Final = ("ours: tensor, stages, pipelines, samples", "layers again", "step", "MFU", "GB", "idle", "planned in")


def figures(model: Model, found: Found, rate: float) -> list[str]:
    """The columns `FIGURES`. `rate`: TFLOPs of a step per GPU, without recomputation."""
    layout, prediction = found.layout, found.prediction
    again = sum(len(stage.recomputed_blocks) for stage in prediction.plan.stages)
    return [
        f"{layout.tensor}, {layout.stages}, {layout.pipelines}, {layout.size}",
        str(again),
        f"{prediction.seconds:.1f} s",
        f"{rate * 1e12 / prediction.seconds / model.cluster.kinds[0].peak_flops['bfloat16']:.0%}",
        f"{max(prediction.peak_bytes) / 1e9:.0f}",
        f"{prediction.idle:.0%}",
        f"{found.seconds:.0f} s",
    ]


def a100(gpus: int) -> Cluster:
    """Nodes of eight A100 of 80 GB."""
    return preset_cluster("dgx_a100", num_nodes=gpus // 8)


SIZES: Final = (1024, 3072, 8192, 16384)


def growing(graph: OperatorGraph, batch_size: int, options: argparse.Namespace) -> Iterator[str]:
    """One model on more and more GPUs."""
    rows = []
    flops = 3 * batch_size * sum(operator.flops.at(1) for operator in graph) / 1e12
    for gpus in SIZES[: options.rows]:
        model = Model(graph=graph, cluster=a100(gpus), batch_size=batch_size)
        found = best(model, options.seconds)
        rows.append([gpus, batch_size, *figures(model, found, flops / gpus)])
        print(rows[-1], flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    yield table(["GPUs", "mini-batch", *FIGURES], rows)
    yield f"\nPeak memory of this process: {peak:.1f} GB."


SECTIONS: Final[dict[str, Callable[[argparse.Namespace], Iterator[str]]]] = {
    "megatron": megatron,
    "gpt": lambda options: growing(gpt(128, 25600), 6144, options),
    "multimodal": lambda options: growing(multimodal(), 6144, options),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help="all by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search of auto")
    parser.add_argument("--rows", type=int, help="only the first rows")
    options = parser.parse_args()
    for name in options.sections:
        print(f"\n### {name}\n", *SECTIONS[name](options), sep="\n", flush=True)


if __name__ == "__main__":
    main()
