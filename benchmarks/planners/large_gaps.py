"""Models of 13 and 50 billion parameters: plans of `auto`, and their distance from the lower bound.

    python -m benchmarks.planners.large_gaps [seconds of each search] [schedule]

Without tensor parallelism, in bfloat16 with AdamW, and a tenth of the memory left free.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Final

from benchmarks.planners.common import table
from benchmarks.planners.large_models import gpt
from lightning_gpp.cluster import preset_cluster
from lightning_gpp.costs.model import Footprint
from lightning_gpp.planning import Problem, Request, best_plan
from lightning_gpp.planning.bounds.bound import lower_bound

GAPS: Final = ((40, 5120, 1, 64), (40, 5120, 1, 256), (64, 8192, 128, 2048), (64, 8192, 128, 8192))
"""Layers, width, nodes of eight H100, and mini-batch."""

BOUND_SECONDS: Final = 60.0
"""Time limit of a bound. Those of 52 billion parameters take about ten seconds."""


def gaps(seconds: float, schedule: str = "1f1b") -> str:
    """Plans of `auto` without tensor parallelism, and their distance from the bound, with and without memory in it."""
    rows = []
    for layers, width, nodes, batch_size in GAPS:
        graph, cluster = gpt(layers, width, whole=False), preset_cluster("dgx_h100", num_nodes=nodes)
        footprint = Footprint(optimizer="adamw", precision="bf16-true")
        limits = {"idle_devices": False, "seconds": seconds, "bound_seconds": BOUND_SECONDS}
        request = Request(cluster=cluster.with_headroom(0.1), batch_size=batch_size, footprint=footprint)
        request = replace(request, sharding="auto", schedules=(schedule,), **limits)
        found = best_plan("auto", graph, request)
        flops = 3 * batch_size * sum(operator.flops.at(1) for operator in graph)
        peak = cluster.kinds[0].peak_flops["bfloat16"] * cluster.num_devices
        ample = lower_bound(_with_ample_memory(request.problem(graph)), BOUND_SECONDS)
        rows.append(
            [
                f"{sum(graph.parameter_sizes.values()) / 1e9:.0f}",
                cluster.num_devices,
                batch_size,
                f"{found.num_pipelines}, {len(found.plan.stages)}",
                f"{found.seconds:.2f} s",
                f"{flops / peak / found.seconds:.0%}",
                f"{max(found.peak_bytes) / 1e9:.0f} of {found.memory_bytes[0] / 1e9:.0f}",
                f"{found.seconds / ample - 1:.0%}",
                f"{found.seconds / found.lower_bound - 1:.0%}",
            ]
        )
        print(rows[-1], flush=True)
    header = ["10^9 parameters", "GPUs", "mini-batch", "pipelines, stages", "step", "MFU", "GB"]
    return table([*header, "gap without memory in the bound", "gap"], rows)


def _with_ample_memory(problem: Problem) -> Problem:
    devices = tuple(replace(device, memory_bytes=1e18) for device in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


if __name__ == "__main__":
    print(gaps(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0, *sys.argv[2:3]))
