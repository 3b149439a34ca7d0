"""Models of 13 and 50 billion parameters with and without tensor parallelism: what groups of processes gain.

    python -m benchmarks.planners.tensor_parallel [seconds of each search] [row ...]

Plans of `auto` for groups of 1, 2, 4 and 8 devices of a node, for all stages and for each, on nodes of eight H100 in
bfloat16 with AdamW, a tenth of the memory left free. The plan without groups gets as much time alone as all others
together. The last row is a model in which one layer is too large for a device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from benchmarks.planners.common import table
from benchmarks.planners.large_models import LENGTH, REASON, VOCABULARY, divided
from benchmarks.workloads.gpt import GPT, Block
from lightning_gpp.capture import capture_step
from lightning_gpp.cluster import preset_cluster
from lightning_gpp.costs.model import Footprint
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction, Request, best_plan
from lightning_gpp.planning.tensor_parallel import SIZES, best_sizes

WIDE: Final = 20


class OneWideLayer(GPT):
    """A GPT whose middle layer has 20 times as wide an inner layer as the others: 10.8 billion parameters."""

    def __init__(self, num_layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__(num_layers, width, vocabulary, length)
        block = Block(width, width // 128)
        block.up, block.down = nn.Linear(width, 4 * WIDE * width), nn.Linear(4 * WIDE * width, width)
        self.blocks[num_layers // 2] = block


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Layers and width of the model, nodes of eight H100, mini-batch, whether one layer is wide, and sharding."""

    layers: int
    width: int
    nodes: int
    batch_size: int
    wide: bool = False
    sharding: str = "auto"

    def graph(self) -> OperatorGraph:
        """The undivided graph, which knows what members divide."""
        with torch.device("meta"):
            kind = OneWideLayer if self.wide else GPT
            module = kind(self.layers, self.width, VOCABULARY, LENGTH).to(torch.bfloat16)
            batch = torch.zeros(4, LENGTH + 1, dtype=torch.long)
        uncut = {f"blocks.{layer}": REASON for layer in range(self.layers)}
        graph, detail = capture_step(module, batch, uncut=uncut).graph, capture_step(module, batch).graph
        return replace(graph, divided=divided(graph), regions=frozenset(uncut), detail=detail)


ROWS: Final = (
    Row(layers=40, width=5120, nodes=1, batch_size=64),
    Row(layers=40, width=5120, nodes=8, batch_size=512),
    Row(layers=64, width=8192, nodes=8, batch_size=128),
    Row(layers=64, width=8192, nodes=8, batch_size=512),
    Row(layers=64, width=8192, nodes=32, batch_size=512),
    Row(layers=24, width=8192, nodes=1, batch_size=64, wide=True, sharding="none"),
)


def compared(row: Row, seconds: float) -> list[str]:
    """The columns `HEADER`."""
    regions, cluster = row.graph(), preset_cluster("dgx_h100", num_nodes=row.nodes).with_headroom(0.1)
    alone = replace(regions.detail or regions, divided=regions.divided)
    request = Request(cluster=cluster, batch_size=row.batch_size, sharding=row.sharding, seconds=seconds)
    request = replace(request, footprint=Footprint(optimizer="adamw", precision="bf16-true"), idle_devices=False)
    try:
        single = best_plan("auto", alone, request).samples_per_second
    except PlanError:
        single = 0.0
    began = time.perf_counter()
    found = best_sizes("auto", request, {number: alone if number == 1 else regions for number in SIZES})
    elapsed = time.perf_counter() - began
    best = found.prediction
    return [
        f"{sum(regions.parameter_sizes.values()) / 1e9:.0f}{', one wide layer' * row.wide}",
        str(cluster.num_devices),
        str(row.batch_size),
        f"{single:.4g}" if single else "no plan",
        *(_rate(found.plans, number) for number in SIZES[1:]),
        f"{found.mixed.samples_per_second:.4g} ({_processes(found.mixed.plan)})" if found.mixed else "no plan",
        f"{best.samples_per_second / single:.2f}" if single else "-",
        f"{best.gap:.0%}",
        f"{elapsed:.0f} s",
    ]


def _rate(plans: Mapping[int, Prediction], number: int) -> str:
    return f"{plans[number].samples_per_second:.4g}" if number in plans else "no plan"


def _processes(plan: Plan) -> str:
    """Processes per device of all stages, in their order."""
    return ", ".join(f"{len(stage.devices)} x {stage.tensor_parallel_size}" for stage in plan.stages)


HEADER: Final = (
    *("10^9 parameters", "GPUs", "mini-batch", "1 process per device", "2", "4", "8"),
    *("search per stage (devices x processes)", "gain", "gap", "planned in"),
)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    rows = []
    for number in map(int, sys.argv[2:] or range(len(ROWS))):
        rows.append(compared(ROWS[number], seconds))
        print(rows[-1], flush=True)
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
